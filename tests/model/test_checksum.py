"""Checksums: the same sums from whatever computes them, and the fast code where there is some."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nostall
from nostall._model import checksum
from nostall.core import AsyncCallsQueue
from support import loaded
from support.faults import writer_pids
from support.processes import ended
from support.ranks import TESTS
from support.states import blobs, save_now, schedule


@given(st.binary(max_size=5000), st.integers(min_value=0, max_value=2**32 - 1))
def test_the_fast_sum_is_the_slow_sum(content: bytes, before: int) -> None:
    """Both sums agree for any bytes, and when they go on with any earlier sum."""
    assert checksum.use_fastest() is not None
    assert checksum.crc32 is not zlib.crc32
    assert checksum.crc32(memoryview(content), before) == zlib.crc32(content, before)


def test_the_writer_process_has_the_fast_code(tmp_path: Path) -> None:
    """Mapped, once it has written something."""
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path, {"weight": torch.arange(1000.0)})
        queue.wait()
        (pid,) = writer_pids()
        assert "isal_zlib" in Path(f"/proc/{pid}/maps").read_text()


ISOLATED = """
import sys
sys.path.append(sys.argv[1])
import nostall._writer.main
from nostall._model.checksum import use_fastest_from
before = set(sys.modules)
use_fastest_from(sys.argv[2])
print(sorted(name for name in set(sys.modules) - before if not name.startswith("isal")))
print(sorted(name for name in sys.modules if name.split(".")[0] in sys.argv[3:]))
"""
NOT_IMPORTED = ["torch", "numpy", "psutil", "dataclasses", "inspect", "logging", "concurrent"]
"""Modules of no use in the writer process; the last four made its start 23 ms longer."""


def test_the_writers_code_imports_no_other_package_and_nothing_slow() -> None:
    """With the flags and the modules of the writer process."""
    directory = checksum.use_fastest()
    assert directory is not None
    root = str(Path(nostall.__file__).parents[1])
    program = sys.executable, "-I", "-S", "-c", ISOLATED
    done = ended(*program, root, directory, *NOT_IMPORTED, timeout_s=60)
    assert done.stdout == "[]\n[]\n"


WITHOUT = """
import sys
sys.modules["isal"] = None
sys.path.insert(0, sys.argv[2])
import torch
from nostall.core import AsyncCallsQueue
from support.faults import writer_pids
from pathlib import Path
from support.states import schedule

with AsyncCallsQueue() as queue:
    schedule(queue, Path(sys.argv[1]), {"weight": torch.arange(1000.0)})
    queue.wait()
    maps = Path(f"/proc/{writer_pids()[0]}/maps").read_text()
    print("isal" in maps, "isal.isal_zlib" in sys.modules)
"""


@pytest.mark.slow
def test_without_the_extra_a_checkpoint_is_the_same(tmp_path: Path) -> None:
    """Byte for byte; the standard library's sums are as good."""
    program = *loaded.python(), "-c", WITHOUT
    done = ended(*program, str(tmp_path / "without"), str(TESTS), timeout_s=60)
    assert done.stdout == "False False\n"
    state = {"weight": torch.arange(1000.0)}
    save_now(tmp_path / "with", state)
    assert blobs(tmp_path / "without") == blobs(tmp_path / "with")


def test_what_cannot_be_imported_leaves_zlibs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a working ``isal``, as in a replaced environment, the sum of zlib stays in use."""
    monkeypatch.setattr(checksum, "crc32", checksum.crc32)
    monkeypatch.setitem(sys.modules, "isal", None)
    before = list(sys.path)
    checksum.use_fastest_from("/nowhere")
    assert checksum.crc32 is zlib.crc32
    assert sys.path == before
