"""A process that ends while threads are in torch has its own exit status."""

from __future__ import annotations

import subprocess

from support import loaded

ENDS_WHILE_GLOO_WORKS = """
import torch
import torch.distributed as dist
import nostall.filesystem_async

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(100):
    dist.all_reduce(torch.ones(5_000_000), async_op=True)
"""


def test_an_interpreter_that_ends_lets_gloo_free_its_tensors() -> None:
    """A thread that did it later would abort the process; the group was not destroyed."""
    done = subprocess.run(
        [*loaded.python(), "-W", "ignore", "-c", ENDS_WHILE_GLOO_WORKS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
