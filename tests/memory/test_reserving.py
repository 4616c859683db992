"""Memory for snapshots in a container with a limit: an error, and nobody is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nostall._memory import arena
from nostall._memory.arena import Block
from nostall.errors import ReservationError
from support.trainers import running
from support.waiting import wait_until

MIB = 1 << 20


@contextmanager
def memory_limit(nbytes: int) -> Iterator[Path]:
    """The file to which a process writes its id to be limited; skips where no group can be made."""
    top = Path("/sys/fs/cgroup")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    entries = dict(line.split(":")[1:] for line in lines)
    if "memory" in entries:
        parent, name = top / "memory" / entries["memory"][1:], "memory.limit_in_bytes"
    else:
        parent, name = top, "memory.max"
    group = parent / f"nostall-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if not (group / name).exists():
            pytest.skip("control groups do not limit memory here")
        (group / name).write_text(str(nbytes))
        yield group / "cgroup.procs"
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())  # they end
        group.rmdir()


def test_two_ranks_of_a_container_share_what_it_has() -> None:
    """Memory that is enough for one: at most one gets it, others an error; ten times."""
    with memory_limit(700 * MIB) as group, ExitStack() as stack:
        ranks = [
            stack.enter_context(running("reserves", str(group), str(400 * MIB))) for _ in range(2)
        ]
        for rank in ranks:
            assert 400 * MIB < rank.hear()["available"] < 750 * MIB
        for _ in range(10):
            for rank in ranks:
                rank.tell()
            told = [rank.hear() for rank in ranks]
            outcomes = sorted(key for each in told for key in each)
            assert outcomes in (["error", "reserved"], ["error", "error"])
            for rank in ranks:
                rank.tell()
                assert rank.hear() == {}


def test_a_rank_leaves_room_for_its_writer_process() -> None:
    """A reservation within 12 MiB of the limit is refused; the writer process takes that much."""
    with (
        memory_limit(300 * MIB) as group,
        running(*("reserves_all_but", str(group), str(12 * MIB))) as rank,
    ):
        assert "bytes available" in rank.hear()["error"]


def test_what_a_failed_reservation_took_is_free_before_others_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A larger block that cannot grow keeps what it has, and no more."""
    left = iter([1 << 40, 1 << 40, 0, 0])
    monkeypatch.setattr(arena, "available_nbytes", lambda: next(left))
    monkeypatch.setattr(arena, "_MOST_AT_ONCE_NBYTES", 2 * MIB)
    block = Block(2 * MIB)
    with pytest.raises(ReservationError, match="0 bytes available"):
        block.grow(8 * MIB)
    assert block.nbytes == 2 * MIB
    assert os.fstat(block.fd).st_blocks * 512 == 2 * MIB
