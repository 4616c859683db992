"""Save :func:`state` with the installed torch, by both writers, into a directory of its version.

The directories beside this file were made with it, each in an environment of ``nox -s tests_min``
or ``nox -s tests_next``::

    .nox/tests_next/bin/python tests/checkpoints/make.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from nostall import FileSystemWriterAsync

HERE = Path(__file__).parent


def state() -> dict[str, Any]:
    """Two tensors and an object."""
    return {
        "model": {"weight": torch.arange(12.0).reshape(3, 4).t()},
        "optimizer": {"step": torch.tensor(7.0), "lr": 0.5},
    }


def main() -> None:
    """Make the two checkpoints."""
    made = HERE / f"torch-{torch.__version__.partition('+')[0]}"
    made.mkdir()
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(made / "stock"))
    dcp.save(state(), storage_writer=FileSystemWriterAsync(made / "nostall"))


if __name__ == "__main__":
    main()
