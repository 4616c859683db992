"""Copies past the cache copy every byte and no other one; without them nothing is missing."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nostall
from nostall import _torch
from nostall._memory import copying as _copying
from nostall._memory import nontemporal
from nostall.core import AsyncCallsQueue
from nostall.options import EngineOptions
from support import loaded
from support.processes import ended
from support.states import blobs, schedule

MIB = 1 << 20
GUARD = 64
"""Bytes around a destination that nothing may change."""

has_avx = pytest.mark.skipif(
    platform.machine() != "x86_64" or not _torch.runs_avx(), reason="the processor has no AVX"
)


def past_caches() -> nontemporal.Copy:
    copy = nontemporal.copy_past_caches(_copying._memcpy_at_once)
    assert copy is not None
    return copy


@has_avx
@settings(max_examples=300)
@given(
    to=st.integers(0, GUARD), of=st.integers(0, GUARD), nbytes=st.integers(0, 4096), data=st.data()
)
def test_it_copies_every_byte_and_no_other_one(to: int, of: int, nbytes: int, data: Any) -> None:
    """Whatever the length, and however source and destination are aligned."""
    seed = data.draw(st.integers(0, 1 << 30))
    source = torch.randint(
        256,
        (GUARD + 4096,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    there = torch.full((3 * GUARD + 4096,), 0xA5, dtype=torch.uint8)
    expected = there.clone()
    expected[to : to + nbytes] = source[of : of + nbytes]
    past_caches()(there.data_ptr() + to, source.data_ptr() + of, nbytes)
    assert torch.equal(there, expected)


@has_avx
def test_other_threads_run_meanwhile() -> None:
    """It gives up the interpreter's lock: a waiting thread gets it before the copy is over."""
    source = torch.ones(256 * MIB, dtype=torch.uint8)
    there = torch.empty_like(source)
    copy = past_caches()  # here, as what makes it gives up the lock, too
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no thread is made to give it up
    try:
        # The system may let the other thread wait for a core; not every time.
        assert any(_is_seen_halfway(copy, source, there) for _ in range(50))
    finally:
        sys.setswitchinterval(interval)


def _is_seen_halfway(copy: nontemporal.Copy, source: torch.Tensor, there: torch.Tensor) -> bool:
    there.zero_()
    copying, seen = threading.Event(), []

    def look() -> None:
        copying.wait(30)
        seen.append(int(there[-1]))

    thread = threading.Thread(target=look)
    thread.start()
    copying.set()
    copy(there.data_ptr(), source.data_ptr(), source.nbytes)
    thread.join(30)
    assert int(there[-1]) == 1
    return seen == [0]


def save_twice(path: Path) -> dict[str, torch.Tensor]:
    """More than caches hold, in pieces of odd lengths and forms; also over an older snapshot."""
    numbers = torch.arange(9 * MIB + 5, dtype=torch.float32)
    state = {
        "odd": numbers,
        "transposed": numbers[: 8 * MIB].view(1024, -1).t(),
        "shifted": numbers[3 : 3 + 2 * MIB],
        "bytes": torch.arange(7 * MIB + 1, dtype=torch.int64).to(torch.uint8),
    }
    with AsyncCallsQueue() as queue:
        for number in range(2):
            for tensor in (state["odd"], state["bytes"]):
                tensor.add_(1)
            schedule(queue, path / str(number), state)
            queue.maybe_finalize_async_calls(blocking=True)
    return state


@has_avx
@pytest.mark.parametrize("threads", [1, 3])
def test_snapshots_of_more_than_caches_hold_have_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Items of large snapshots equal, byte for byte, those that stock writes."""
    copied: list[int] = []

    def noted(to: int, of: int, nbytes: int) -> None:
        copied.append(nbytes)
        copy_now(to, of, nbytes)

    assert _copying._copy_of_much.__wrapped__() is not _copying._memcpy
    copy_now = past_caches()
    monkeypatch.setattr(_copying, "_copy_of_much", lambda: noted)
    nostall.configure(EngineOptions(copy_threads=threads))
    state = save_twice(tmp_path)
    assert sum(copied) == 2 * sum(tensor.nbytes for tensor in state.values())
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert blobs(tmp_path / "1") == blobs(tmp_path / "stock")


def refuse(*_: object) -> int | None:
    """Fail like ``mmap`` on a system that gives no executable memory."""
    ctypes.set_errno(errno.EPERM)
    return ctypes.c_void_p(-1).value


@pytest.mark.parametrize("lack", ["another processor", "no memory to execute"])
def test_without_it_snapshots_are_copied_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lack: str
) -> None:
    """With memcpy, and without a word to users, who have lost nothing that they had."""
    if lack == "another processor":
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    else:
        libc = SimpleNamespace(mmap=refuse)
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)
    with caplog.at_level(logging.WARNING):
        chosen = _copying._copy_of_much.__wrapped__()  # anew, as in a process of its own
    assert chosen is _copying._memcpy
    assert not caplog.records


def test_an_option_decides_whether_machine_code_is_mapped(tmp_path: Path) -> None:
    """With ``copy_past_caches=False`` nostall maps no executable memory; it saves the same."""
    program = """
import sys
from pathlib import Path
import nostall
from test_nontemporal import save_twice

for switch in (False, True):
    nostall.configure(nostall.EngineOptions(copy_past_caches=switch))
    save_twice(Path(sys.argv[1]) / str(switch))
    print("nostall-copy-past-caches" in Path("/proc/self/maps").read_text())
"""
    command = *loaded.python(), "-c", program, str(tmp_path)
    paths = {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = ended(*command, timeout_s=120, environment=paths)
    possible = platform.machine() == "x86_64" and _torch.runs_avx()
    assert done.stdout.split() == ["False", str(possible)]
    assert blobs(tmp_path / "False" / "1") == blobs(tmp_path / "True" / "1")


def test_what_switches_torchs_own_vector_code_off_switches_it_off() -> None:
    """One variable for a user who suspects such code."""
    program = "from nostall._memory import copying as c; print(c._copy_of_much() is c._memcpy)"
    switch = {"ATEN_CPU_CAPABILITY": "default"}
    done = ended(sys.executable, "-c", program, timeout_s=120, environment=switch)
    assert done.stdout.strip() == "True"


@has_avx
def test_the_code_cannot_be_written_to() -> None:
    """The memory with the machine code is executable, not writable."""
    address = nontemporal._executable(nontemporal._CODE)
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "r-xp"
            return
    raise AssertionError("it is nowhere")
