"""Snapshot memory: reused, bounded, waited for with a deadline, and given back whatever happens."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nostall._memory.arena import Arena, Block, Lease, address_of, available_nbytes
from nostall._model.threads import is_done
from nostall.errors import ReservationError, SaveAbortedError, SaveTimeoutError
from support import loaded
from support.waiting import stands_in, wait_until

MIB = 1 << 20
UNIT = 2 * MIB
"""Blocks are whole multiples of this."""
V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
SOON = 30.0
"""A deadline that only a broken arena reaches."""


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(max_blocks=2)
    yield made
    made.close()


def lease(arena: Arena, nbytes: int, *, beyond_limit: bool = False) -> Lease:
    return arena.lease(nbytes, timeout_s=SOON, beyond_limit=beyond_limit)


def somebody_waits() -> bool:
    """Whether another thread has asked for a lease that it does not get yet."""
    threads = threading.enumerate()
    return any(stands_in(each, Arena.lease) and stands_in(each, is_done) for each in threads)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- reuse ----------------------------------------------------------------------------------------


def test_a_block_has_room_for_what_was_asked_in_whole_units() -> None:
    """Also for nothing: a rank may have no tensors. Programs of the trainer's do not inherit it."""
    for nbytes, expected in ((0, UNIT), (1, UNIT), (UNIT, UNIT), (UNIT + 1, 2 * UNIT)):
        block = Block(nbytes)
        assert block.nbytes == expected
        assert len(block.memory) == expected
        assert os.fstat(block.fd).st_blocks * 512 == expected
        assert not os.get_inheritable(block.fd)


def test_the_smallest_block_that_fits_is_taken() -> None:
    """A small save does not take the memory that the next large one needs, in either order."""
    for order in (0, 1), (1, 0):
        arena = Arena(max_blocks=2)
        held = [lease(arena, 5 * UNIT), lease(arena, UNIT)]
        large, small = (one.block for one in held)
        for position in order:
            held[position].release()
        again = lease(arena, UNIT)
        assert again.block is small
        assert lease(arena, UNIT + 1).block is large


def test_a_larger_request_makes_a_free_block_grow() -> None:
    """Growth keeps the pages that are there, and each holder of a mapping is to map anew."""
    dropped: list[int] = []
    arena = Arena(max_blocks=2, on_drop=lambda block: dropped.append(block.id))
    first = lease(arena, UNIT)
    block_id = first.block.id
    first.block.prepared_views = ("key", "views")
    first.block.memory[:4] = b"kept"
    first.release()
    second = lease(arena, 3 * UNIT)
    assert second.block.id != block_id
    assert dropped == [block_id]
    assert first.block.prepared_views is None
    assert second.block.memory[:4] == b"kept"
    assert len(second.block.memory) == os.fstat(second.block.fd).st_size == 3 * UNIT
    assert arena.reserved_nbytes == 3 * UNIT


def test_a_block_with_an_exported_view_is_replaced_instead() -> None:
    """A view on its memory stays what it is, however long it is held."""
    arena = Arena(max_blocks=2)
    first = lease(arena, UNIT)
    view = first.block.image(0, 4)
    view[:] = b"kept"
    first.block.is_shown = True  # as by a stager, whose tensors can outlive the lease
    first.release()
    second = lease(arena, 3 * UNIT)
    assert second.block is not first.block
    second.block.memory[:4] = b"new "
    assert bytes(view) == b"kept"
    assert arena.reserved_nbytes == 3 * UNIT


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_count(tmp_path: Path, version: int) -> None:
    """The least that the host and each enclosing group have left; idle page cache is free."""
    limit, usage = ("memory.max", "memory.current") if version == 2 else V1_FILES
    top = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    inner = top / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    entry = "0::/outer/inner" if version == 2 else "4:cpu,memory:/outer/inner"
    (tmp_path / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n{entry}\n")
    (inner / limit).write_text("max\n" if version == 2 else f"{1 << 62}\n")
    (inner / usage).write_text("1\n")
    assert available_nbytes(root=str(tmp_path)) > 5000
    (top / "outer" / limit).write_text("6000\n")
    (top / "outer" / usage).write_text("5000\n")
    (top / "outer" / "memory.stat").write_text("anon 1\ninactive_file 234\n")
    assert available_nbytes(root=str(tmp_path)) == 1234
    assert available_nbytes(root=str(tmp_path / "nothing there")) > 5000


def test_memory_does_not_grow_with_the_number_of_saves(arena: Arena) -> None:
    """A hundred saves in turn need one block, warm, whatever the order of their sizes."""
    lease(arena, 4 * UNIT).release()
    descriptors = open_descriptors()
    for number in range(100):
        lease(arena, (number * 37 % 5) * UNIT).release()
    assert arena.reserved_nbytes == 4 * UNIT
    assert open_descriptors() == descriptors


def test_a_buffer_leaves_the_block_that_is_prepared_for_a_snapshot(arena: Arena) -> None:
    """Unless there is no room for another block; the next buffer needs no further memory."""
    first = lease(arena, 4 * UNIT)
    first.block.prepared_views = ("key", "views")
    prepared = first.block
    first.release()
    buffer = arena.lease(2 * UNIT, timeout_s=SOON, as_buffer=True)
    assert buffer.block is not prepared
    buffer.release()
    assert arena.lease(2 * UNIT, timeout_s=SOON, as_buffer=True).block is buffer.block
    assert arena.reserved_nbytes == 6 * UNIT
    snapshot = lease(arena, 4 * UNIT)
    assert snapshot.block is prepared
    assert prepared.prepared_views == ("key", "views")
    buffer.block.prepared_views = ("another", "views")
    assert arena.lease(2 * UNIT, timeout_s=SOON, as_buffer=True).block is buffer.block


# --- waiting --------------------------------------------------------------------------------------


def test_a_waiting_lease_that_needs_more_than_comes_back_gets_a_larger_block(arena: Arena) -> None:
    """It is the place of the returned block that counts, not its size."""
    first, second = lease(arena, UNIT), lease(arena, UNIT)
    with pytest.raises(SaveTimeoutError, match="2 snapshot buffers"):
        arena.lease(3 * UNIT, timeout_s=0.02)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease, arena, 3 * UNIT)
        wait_until(somebody_waits)
        first.release()
        assert waiting.result(SOON).block.nbytes == 3 * UNIT
    assert second.held
    assert arena.reserved_nbytes == 4 * UNIT


def test_no_more_blocks_are_out_than_allowed(arena: Arena) -> None:
    """However many threads ask, at most ``max_blocks`` have one, each alone, and all get theirs."""
    lock = threading.Lock()
    crowded = threading.Event()
    out: list[int] = []
    most: list[int] = []

    def save(number: int) -> None:
        for _ in range(20):
            held = lease(arena, UNIT)
            with lock:
                assert held.block.id not in out
                out.append(held.block.id)
                most.append(len(out))
            held.block.memory[0:1] = bytes([number])
            wait_until(lambda: crowded.is_set() or somebody_waits() or len(out) > 2)
            crowded.set()
            with lock:
                assert held.block.memory[0] == number
                out.remove(held.block.id)
            held.release()

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(save, number) for number in range(6)]:
            done.result(SOON)
    assert max(most) <= 2
    assert arena.reserved_nbytes <= 2 * UNIT


def test_beyond_the_limit_a_lease_is_given_at_once_and_not_kept(arena: Arena) -> None:
    """Who holds one already never waits for another; the surplus goes back to the system."""
    held = [lease(arena, UNIT), lease(arena, UNIT)]
    surplus = lease(arena, UNIT, beyond_limit=True)
    assert arena.reserved_nbytes == 3 * UNIT
    surplus.release()
    assert arena.reserved_nbytes == 2 * UNIT
    for one in held:
        one.release()
    assert arena.reserved_nbytes == 2 * UNIT


# --- giving back ----------------------------------------------------------------------------------


def test_a_forgotten_lease_gives_its_block_back(arena: Arena) -> None:
    """An exception between staging and writing does not cost memory for ever."""
    held = lease(arena, UNIT)
    block_id = held.block.id
    cycle = [held]
    cycle.append(cycle)  # type: ignore[arg-type]  # only the garbage collector ends this
    del held, cycle
    gc.collect()
    again = [lease(arena, UNIT), lease(arena, UNIT)]
    assert block_id in {one.block.id for one in again}


def test_releasing_twice_does_not_take_the_next_ones_block() -> None:
    """``release`` is idempotent, also after the block has a new holder."""
    arena = Arena(max_blocks=1)
    first = lease(arena, UNIT)
    first.release()
    second = lease(arena, UNIT)
    first.release()
    assert not first.held
    assert second.held
    with pytest.raises(SaveTimeoutError):
        arena.lease(UNIT, timeout_s=0)


def test_a_closed_arena_keeps_nothing_and_gives_nothing() -> None:
    """Leased memory goes when it is returned; a lease is an error. Nothing is in a directory."""
    gc.collect()  # what earlier tests have left would go in the middle of this one
    before = open_descriptors(), sorted(os.listdir("/dev/shm"))
    dropped: list[int] = []
    arena = Arena(max_blocks=2, on_drop=lambda block: dropped.append(block.id))
    held, free = lease(arena, UNIT), lease(arena, UNIT)
    assert open_descriptors() > before[0]
    assert sorted(os.listdir("/dev/shm")) == before[1]
    ids = [free.block.id, held.block.id]
    free.release()
    arena.close()
    assert dropped == ids[:1]
    assert arena.reserved_nbytes == UNIT
    held.release()
    assert dropped == ids
    assert arena.reserved_nbytes == 0
    for beyond_limit in (False, True):
        with pytest.raises(SaveAbortedError):
            lease(arena, UNIT, beyond_limit=beyond_limit)
    arena.close()
    del held, free
    gc.collect()
    assert (open_descriptors(), sorted(os.listdir("/dev/shm"))) == before


def test_closing_wakes_who_waits(arena: Arena) -> None:
    """A save that waits for memory of an engine that is closed fails then, not at its deadline."""
    held = [lease(arena, UNIT), lease(arena, UNIT)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease, arena, UNIT)
        wait_until(somebody_waits)
        arena.close()
        with pytest.raises(SaveAbortedError):
            waiting.result(SOON / 2)
    assert all(one.held for one in held)


# --- the system -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "limit", "why"),
    [
        (1 << 50, None, "bytes available"),
        (1 << 70, None, "bytes available"),
        (16 * MIB, 8 * MIB, os.strerror(errno.EFBIG)),  # on files, which holds for memory as well
    ],
)
def test_more_memory_than_there_is_is_an_error_that_says_how_much(
    arena: Arena, nbytes: int, limit: int | None, why: str
) -> None:
    """And why. Nothing is taken, no descriptor stays open, and the next save that fits works."""
    descriptors = open_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit or soft, hard))
    try:
        with pytest.raises(ReservationError) as caught:
            lease(arena, nbytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value, MemoryError)
    assert caught.value.nbytes == nbytes
    assert str(nbytes) in str(caught.value)
    assert why in str(caught.value)
    assert caught.value.phase == "stage"
    assert caught.value.hint
    assert open_descriptors() == descriptors
    assert arena.reserved_nbytes == 0
    assert lease(arena, 16 * MIB).held


# --- forked children ------------------------------------------------------------------------------

FORK = """
import gc, mmap, os, signal, threading
from nostall._memory.arena import Arena, address_of

def in_child(check):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        check()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""

MEMORY_OF_ITS_OWN = (
    FORK
    + """
import ctypes
arena = Arena(max_blocks=2)
held, free = [arena.lease(32 << 20, timeout_s=0) for _ in range(2)]
free.release()
begin = address_of(held.block)
held.block.memory[:6] = b"parent"

def check():
    global arena, held, free
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [link for link in links if "memfd" in link], links
    # The system places new memory where it is free: that of the blocks among others.
    mine = [mmap.mmap(-1, 4 << 20) for _ in range(64)]
    places = [ctypes.addressof(ctypes.c_char.from_buffer(piece)) for piece in mine]
    assert any(begin <= place < begin + (32 << 20) for place in places)
    for number, piece in enumerate(mine):
        piece.write(bytes([number]) * len(piece))
    del arena, held, free
    gc.collect()
    for number, piece in enumerate(mine):
        assert piece[0] == piece[-1] == number

in_child(check)
assert held.held and held.block.memory[:6] == b"parent"
"""
)

LOCKED = (
    FORK
    + """
reached, go_on = threading.Event(), threading.Event()

def on_drop(block):
    reached.set()
    go_on.wait()

arena = Arena(max_blocks=3, on_drop=on_drop)
held = arena.lease(1, timeout_s=0)
arena.lease(1, timeout_s=0).release()
thread = threading.Thread(target=lambda: arena.lease(8 << 20, timeout_s=0))
thread.start()
reached.wait()

def check():
    held.release()

in_child(check)
go_on.set()
thread.join()
assert held.held
"""
)


@pytest.mark.parametrize(
    "script", [MEMORY_OF_ITS_OWN, LOCKED], ids=["memory of its own", "another thread in the arena"]
)
def test_a_forked_child_has_nothing_to_do_with_the_arena(script: str) -> None:
    """A data loader's worker keeps no block alive, loses no memory to one, and does not wait."""
    subprocess.run([*loaded.python(), "-W", "ignore", "-c", script], check=True, timeout=60)


# --- finding --------------------------------------------------------------------------------------


def test_a_lease_is_found_by_any_address_in_its_block(arena: Arena) -> None:
    """From the first byte to the last, and nothing outside; until it is released."""
    one, other = lease(arena, UNIT), lease(arena, 2 * UNIT)
    for held in (one, other):
        begin = address_of(held.block)
        for inside in (0, 1, held.block.nbytes // 2, held.block.nbytes - 1):
            assert arena.lease_at(begin + inside) is held
    assert arena.lease_at(0) is None
    outside = address_of(Block(UNIT))
    assert arena.lease_at(outside) is None
    address, one.label = address_of(one.block), "old"
    one.release()
    assert arena.lease_at(address) is None
    assert lease(arena, UNIT).label is None


def test_leases_can_be_looked_for_while_others_come_and_go() -> None:
    """One save stages while another one looks for its memory, as with ``dcp.async_save``."""
    arena = Arena(max_blocks=46)
    fixed = [lease(arena, UNIT) for _ in range(40)]
    address = address_of(fixed[0].block)
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            for one in [lease(arena, UNIT) for _ in range(6)]:
                one.release()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            coming_and_going = pool.submit(come_and_go)
            try:
                found = {arena.lease_at(address) for _ in range(3000)}
            finally:
                done.set()
            coming_and_going.result(SOON)
    finally:
        sys.setswitchinterval(interval)
    assert found == {fixed[0]}
