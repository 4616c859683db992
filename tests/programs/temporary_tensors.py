"""Print the page faults of eight temporary tensors in a process that has done nothing else.

python tests/programs/temporary_tensors.py fresh|kept MEBIBYTES
"""

from __future__ import annotations

import resource
import sys
from contextlib import nullcontext

import torch

from nostall._bench.processes import fresh_pages_for_each_block


def use(nbytes: int) -> None:
    """Make a tensor, fill it, and free it."""
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)


kind, mebibytes = sys.argv[1:]
length = int(mebibytes) << 20
for _ in range(8):
    use(length)
with fresh_pages_for_each_block() if kind == "fresh" else nullcontext():
    use(length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        use(length)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
sys.stdout.write(f"{faults}\n")
