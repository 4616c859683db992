"""A pytest plugin that runs other people's tests of stock DCP with nostall's writer and reader.

With ``python -m pytest -p support.in_place_of_stock --classes nostall``, modules that import
stock's classes by name get ours; with ``--classes stock`` they get stock's, to compare. The session
``torch_tests`` of noxfile.py runs PyTorch's own tests so.

Ranks that a test spawns are forked here, with either: they need not import torch, and have the same
classes.
"""

from __future__ import annotations

from multiprocessing.context import ForkProcess, SpawnContext

import pytest
from torch.distributed import checkpoint
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils

from nostall.filesystem_async import FileSystemWriterAsync
from nostall.filesystem_reader import FileSystemReader


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--classes`` says whose writer and reader the tests get."""
    parser.addoption("--classes", choices=["stock", "nostall"], required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Put them in place, before any test is imported."""
    SpawnContext.Process = ForkProcess  # type: ignore[assignment]
    if config.getoption("classes") == "nostall":
        ours = {"FileSystemWriter": FileSystemWriterAsync, "FileSystemReader": FileSystemReader}
        for module in (checkpoint, _storage_utils, filesystem, format_utils):
            vars(module).update(ours)
