"""The queue: what is scheduled is finalised once, in order, after all ranks, or not at all."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock, patch

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._engine import Engine
from nostall._model.threads import is_done
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.core import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    abort_all,
)
from nostall.errors import (
    OptionError,
    ReadError,
    SaveAbortedError,
    SaveTimeoutError,
    StagingError,
)
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import save_state_dict_async_plan
from nostall.torch_ckpt import TorchAsyncCheckpoint
from programs import calls, openers
from programs.entry_points import differing, holds, loaded_wrong, spoil
from programs.queueing import nothing
from support.faults import Fault, Hold, inject
from support.ranks import on_ranks, run_ranks
from support.states import names, planned, read_metadata, save_now, schedule, small_state
from support.waiting import stands_in, wait_until

# --- on one rank ----------------------------------------------------------------------------------


def test_a_group_of_one_rank_does_not_communicate(tmp_path: Path) -> None:
    """A group of one, which torchrun makes on one device, calls no collective in a save or poll."""
    collectives = ("all_reduce", "all_gather", "broadcast", "gather", "scatter")
    refused = {name: Mock(side_effect=AssertionError(name)) for name in collectives}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with patch.multiple(dist, **refused), AsyncCallsQueue() as queue:
            for number in range(3):
                schedule(queue, tmp_path / f"{number}", small_state(number))
                queue.poll()
    finally:
        dist.destroy_process_group()
    for number in range(3):
        assert nostall.verify(tmp_path / f"{number}").ok


# --- on two ranks ---------------------------------------------------------------------------------


@on_ranks("queueing:in_order")
def test_requests_of_all_kinds_are_finalised_in_order(found: list[None]) -> None:
    """Own saves, ``torch.save`` or a part on one rank, nothing at all; by their own indices."""
    assert found == [None, None]


@on_ranks("queueing:two_queues", "queueing:only_one_rank", "queueing:aborted_while_stuck")
def test_one_queue_waits_for_no_other(found: list[None]) -> None:
    """Each queue counts from 0 and may be finalised before an older request of the other.

    ``TorchAsyncCheckpoint`` on one rank is not collective unless asked to be. An abort kills a
    writer that does not answer; its save and the one behind it are never finalised and leave no
    file, and the next saves of both queues are right.
    """
    assert found == [None, None]


FAILURES = {
    "snapshot": "ValueError: no luck [rank=1 phase=stage path=",
    "worker-raises": "ValueError: no luck [rank=1 phase=write]",
    "worker-dies": "ended with exit code 17 [rank=1 phase=write]",
}


@on_ranks(*(f"queueing:fails {where}" for where in FAILURES))
def test_what_fails_on_one_rank_fails_the_request_on_every_rank(found: list[Any]) -> None:
    """Each names the rank and the cause, nothing is left, and the saves around it are whole."""
    for failed in found:
        assert failed["ranks"] == [1]
        assert FAILURES[failed["where"]] in failed["text"]


@on_ranks("queueing:fails finalizer")
def test_a_finalize_function_that_raises_stops_those_after_it_and_no_later_request(
    found: list[Any],
) -> None:
    """The user's own exception is raised on its rank; the other rank, which is done, raises too."""
    there, here = found
    assert (here["text"], here["finalized"]) == ("no luck", [])
    assert (there["ranks"], there["finalized"]) == ([1], ["failed"])
    assert "ValueError: no luck [rank=1 phase=finalize]" in there["text"]


@on_ranks("queueing:not_in_time")
def test_a_rank_that_is_not_in_time_is_late_for_all(found: list[str]) -> None:
    """``wait`` with a timeout raises on every rank and finalises nothing; a later wait does."""
    for here, said in enumerate(found):
        assert f"after 0.2 s with {here} of 1 request unfinished on this rank" in said


@on_ranks("queueing:different_numbers")
def test_ranks_that_scheduled_different_numbers_raise(found: list[str]) -> None:
    """All raise, with the indices, before anything is finalised; after an abort they go on."""
    for rank, said in enumerate(found):
        assert f"rank {rank} polls number 0 and has scheduled up to {1 - rank}" in said
        assert "over all ranks, polled: 0 to 0, scheduled up to: 0 to 1" in said


def test_a_rank_that_does_not_poll_is_named_instead_of_waited_for(tmp_path: Path) -> None:
    """At the deadline, long before the process group's own, and by what it has scheduled."""
    program = "queueing:a_rank_that_does_not_poll_is_named_instead_of_waited_for"
    said, _ = run_ranks(2, program, tmp_path)
    assert "other ranks did not poll within 2.0 s; this one has scheduled 1 request;" in said
    assert "ranks [1] have scheduled fewer requests ({1: 0})" in said


def test_errors_on_all_ranks_do_not_cost_a_checkpoint(tmp_path: Path) -> None:
    """Ranks that leave with an exception together commit what is written.

    One that leaves alone gives it up, talks to no rank that goes on, and its exception gets to
    where it is handled.
    """
    found = run_ranks(2, "queueing:errors_in_the_block", tmp_path)
    assert [together for together, _ in found] == [[], []]
    if sys.version_info >= (3, 11):
        assert "ranks [0] did not exit with an exception" in found[1][1][0]


# --- requests -------------------------------------------------------------------------------------


def test_a_scheduled_request_takes_no_more_finalize_functions() -> None:
    """Freezing refuses them with an error; before, they are appended."""
    order: list[str] = []
    mine = nothing(lambda: order.append("first"))
    mine.add_finalize_fn(lambda: order.append("second"))
    frozen = mine.freeze()
    with pytest.raises(RuntimeError, match="finalize"):
        frozen.add_finalize_fn(lambda: order.append("third"))
    assert frozen._replace(call_idx=4).execute_finalize_fns() == 4
    assert order == ["first", "second"]


def test_a_request_can_be_executed_without_a_queue() -> None:
    """Preload, call with arguments by position and name, finalize: in order, in this process.

    No snapshot is taken for nothing: what is preloaded needs its place among the arguments.
    """
    order: list[Any] = []
    AsyncRequest(
        lambda *args, **kwargs: order.append((args, kwargs)),
        ("one", None),
        [lambda: order.append("finalized")],
        {"name": 3},
        lambda: "preloaded",
    ).execute_sync()
    assert order == [(("one", "preloaded"), {"name": 3}), "finalized"]
    with pytest.raises(OptionError, match="at least two"):
        AsyncRequest(print, [0], [], preload_fn=lambda: order.append("taken")).execute_sync()
    assert len(order) == 2


def test_a_path_among_the_import_paths_ends_no_request(
    tmp_path: Path, queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ignores a path there, or a string of a class of its own; so do saves and callables."""
    text = type("Text", (str,), {})
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, text(tmp_path)])
    schedule(queue, tmp_path / "plain", small_state(1))
    schedule(queue, tmp_path / "streamed", small_state(1), open_file=openers.open_and_sign)
    queue.schedule_async_request(AsyncRequest(os.mkdir, [str(tmp_path / "called")], []))
    queue.wait()
    assert names(tmp_path) == ["called", "plain", "streamed"]


def test_what_cannot_travel_is_refused_when_it_is_scheduled(tmp_path: Path) -> None:
    """A lambda, and a function of the main script, raise at once by name; nothing is pending.

    The error of nostall's own save function in another process says what to do instead.
    """
    in_main: dict[str, Any] = {"__name__": "__main__"}
    exec("def step(): pass", in_main)
    with AsyncCallsQueue() as queue:
        with pytest.raises(StagingError, match=r"<lambda>.*importable module"):
            queue.schedule_async_request(AsyncRequest(lambda: None, [], []))
        with pytest.raises(StagingError, match=r"step is defined in the main script"):
            queue.schedule_async_request(AsyncRequest(in_main["step"], [], []))
        with pytest.raises(StagingError, match="lock"):
            queue.schedule_async_request(AsyncRequest(print, [threading.Lock()], []))
        assert queue.pending == 0
        assert queue.schedule_async_request(nothing()) == 0
    writer = FileSystemWriterAsync(tmp_path)
    save_state_dict_async_plan(small_state(), writer)
    save_fn, _, args = writer.get_save_function_and_args()
    with pytest.raises(TypeError, match="AsyncCallsQueue"):
        deepcopy(save_fn)
    with pytest.raises(OptionError, match="preload_fn"):
        save_fn(*args)


def test_what_is_no_request_no_writer_no_path_or_no_time_is_refused(tmp_path: Path) -> None:
    """By its name, where it is passed, and not by an attribute that it lacks."""
    checkpoint = TorchAsyncCheckpoint()
    with pytest.raises(OptionError, match=r"BytesIO.*pass a path"):
        checkpoint.async_save({}, io.BytesIO())  # type: ignore[arg-type]  # on purpose
    with pytest.raises(OptionError, match="pass a path"):
        checkpoint.async_save({})  # type: ignore[call-arg]  # on purpose
    with AsyncCallsQueue() as queue:
        with pytest.raises(
            OptionError, match=r"type int cannot be scheduled.*pass an AsyncRequest"
        ):
            queue.schedule_async_request(3)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(OptionError, match="FileSystemWriter does not write"):
            save_state_dict_async_plan({}, FileSystemWriter(tmp_path))  # type: ignore[arg-type]  # as above
        impossible: tuple[Any, ...] = (-1.0, float("nan"), "soon")
        for timeout in impossible:
            with pytest.raises(OptionError, match="timeout="):
                queue.wait(timeout=timeout)
            with pytest.raises(OptionError, match="timeout="):
                nostall.warmup(timeout=timeout)
            with pytest.raises(OptionError, match="grace_s="):
                nostall.drain_on_sigterm(timeout)


# --- workers --------------------------------------------------------------------------------------


def test_one_python_worker_serves_all_calls_and_survives_their_errors(tmp_path: Path) -> None:
    """A persistent queue calls in one process, which an exception does not end.

    Arguments are those of the time of scheduling. After the process has died the next call gets a
    new one.
    """
    pids: list[str] = []

    def scheduled(queue: AsyncCallsQueue, *call: Any) -> None:
        path = tmp_path / "pid"
        finalize = [lambda: pids.append(path.read_text())] if call == () else []
        function, *arguments = call or (calls.note_pid, str(path))
        queue.schedule_async_request(AsyncRequest(function, arguments, finalize))

    with AsyncCallsQueue() as queue:
        scheduled(queue)
        tensor = torch.zeros(3)
        scheduled(queue, torch.save, {"tensor": tensor}, str(tmp_path / "saved.pt"))
        tensor.fill_(7)
        assert queue.wait() == [0, 1]
        scheduled(queue, calls.explode, "boom")
        with pytest.raises(CheckpointException, match="Worker failure: ValueError: boom"):
            queue.wait()
        scheduled(queue)
        assert queue.wait() == [3]
        scheduled(queue, calls.leave, 17)
        with pytest.raises(CheckpointException, match=r"Worker failure: .*exit code 17"):
            queue.wait()
        scheduled(queue)
        assert queue.wait() == [5]
    assert pids[0] == pids[1] != pids[2]
    assert str(os.getpid()) not in pids
    assert torch.load(tmp_path / "saved.pt")["tensor"].tolist() == [0, 0, 0]


def test_a_temporal_queue_gives_every_call_a_process(tmp_path: Path) -> None:
    """Scheduled together, each runs by itself; one is finalised while the other still runs."""
    os.mkfifo(tmp_path / "fifo")
    with AsyncCallsQueue(persistent=False) as queue:
        quick = AsyncRequest(calls.note_pid, [str(tmp_path / "quick")], [])
        slow_arguments = [str(tmp_path / "fifo"), str(tmp_path / "slow")]
        slow = AsyncRequest(calls.wait_then_note_pid, slow_arguments, [])
        queue.schedule_async_request(quick)
        queue.schedule_async_request(slow)
        finalized: list[int] = []
        while not finalized:
            finalized = queue.poll()
        assert finalized == [0]
        assert queue.pending == 1
        (tmp_path / "fifo").write_bytes(b"")
        assert queue.wait() == [1]
    assert (tmp_path / "quick").read_text() != (tmp_path / "slow").read_text()


@pytest.mark.parametrize("kind", [PersistentAsyncCaller, TemporalAsyncCaller])
def test_a_caller_can_be_driven_without_a_queue(
    kind: type[PersistentAsyncCaller], tmp_path: Path
) -> None:
    """It takes requests and says whether the oldest is done; finalising is the driver's."""
    caller: AsyncCaller = kind()
    _, request = planned(tmp_path, small_state(1))
    assert caller.is_current_async_call_done()
    with Hold() as hold:
        with inject(hold.fault):
            caller.schedule_async_call(request)
        assert not caller.is_current_async_call_done()
        assert not caller.sync_all_async_calls(is_alive=True)
        hold.release()
        assert caller.is_current_async_call_done(blocking=True)
    assert caller.sync_all_async_calls(is_alive=False)
    request.finalize_fns[0]()
    caller.close()
    assert holds(tmp_path, 1)


# --- waiting --------------------------------------------------------------------------------------


def test_nothing_is_finalised_before_it_is_written(tmp_path: Path) -> None:
    """Until the writer goes on, polls return nothing, waits raise, and there is no metadata."""
    with AsyncCallsQueue() as queue, Hold() as hold:
        with inject(hold.fault):
            index = schedule(queue, tmp_path, small_state(1))
        assert queue.poll() == []
        assert queue.maybe_finalize_async_calls(no_dist=True) == []
        began = time.monotonic()
        with pytest.raises(SaveTimeoutError, match="1 of 1 request") as raised:
            queue.wait(timeout=0.05)
        assert time.monotonic() - began < 5
        assert raised.value.hint is not None
        assert queue.pending == queue.get_num_unfinalized_calls() == 1
        assert not (tmp_path / ".metadata").exists()
        hold.release()
        assert queue.wait(timeout=60) == [index]
        assert queue.pending == 0
        assert queue.wait(timeout=0) == []
    assert holds(tmp_path, 1)


def test_leaving_the_block_finalises_what_is_scheduled(tmp_path: Path) -> None:
    """The end of a ``with`` block waits for all saves; the queue can be used and closed again."""
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "1", small_state(1))
    assert holds(tmp_path / "1", 1)
    assert schedule(queue, tmp_path / "2", small_state(2)) == 1
    assert queue.wait() == [1]
    queue.close()
    queue.close(abort=True)


def test_an_error_in_the_block_is_the_one_that_is_raised(tmp_path: Path) -> None:
    """No failed save, nor what is finalised behind it, hides it; a note says what is lost."""
    finalized: list[str] = []
    queue = AsyncCallsQueue()
    with inject(Fault.errno("chunk", errno.ENOSPC)):
        schedule(queue, tmp_path, small_state(1))
    queue.schedule_async_request(nothing(lambda: finalized.append("it")))
    with pytest.raises(KeyError, match="mine") as raised, queue:
        raise KeyError("mine")
    assert queue.pending == 0
    assert finalized == ["it"]
    assert names(tmp_path) == []
    if sys.version_info >= (3, 11):
        assert "No space left on device" in raised.value.__notes__[0]


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_ctrl_c_while_requests_are_aborted_leaves_none_of_them(tmp_path: Path) -> None:
    """It interrupts the wait for one; the others are aborted all the same."""
    queue, here = AsyncCallsQueue(), threading.current_thread()

    def strike() -> None:
        wait_until(lambda: stands_in(here, Engine.cancel) and stands_in(here, is_done))
        os.kill(os.getpid(), signal.SIGINT)

    with Hold("chunk") as hold, ThreadPoolExecutor(1) as pool:
        with inject(hold.fault):
            schedule(queue, tmp_path / "one", small_state(1))
        schedule(queue, tmp_path / "other", small_state(2))
        hold.wait_reached()
        striking = pool.submit(strike)
        with pytest.raises(KeyboardInterrupt):
            queue.close(abort=True)
        striking.result()
        hold.release()
    assert queue.pending == 0
    wait_until(lambda: nostall.status() == ())
    assert not (tmp_path / "other" / ".metadata").exists()


def test_an_error_in_the_block_does_not_cost_a_checkpoint(tmp_path: Path) -> None:
    """One that is written is committed, and one that is being written as well when it is."""
    queue, here = AsyncCallsQueue(), threading.current_thread()
    with Hold("chunk") as hold, ThreadPoolExecutor(1) as pool:
        schedule(queue, tmp_path / "written", small_state(1))
        wait([call.outcome for call in queue._caller._calls])
        with inject(hold.fault):
            schedule(queue, tmp_path / "being written", small_state(2))

        def release() -> None:
            wait_until(lambda: stands_in(here, AsyncCallsQueue.__exit__))
            hold.release()

        releasing = pool.submit(release)
        with pytest.raises(KeyError, match="mine"), queue:
            raise KeyError("mine")
        releasing.result()
    assert queue.pending == 0
    assert holds(tmp_path / "written", 1)
    assert holds(tmp_path / "being written", 2)


def test_an_error_in_the_block_ends_the_process_of_each_call() -> None:
    """Also where each has its own, and a user's function does not return."""
    nostall.configure(EngineOptions(exit_timeout_s=0.2))
    queue = AsyncCallsQueue(persistent=False)
    before = set(psutil.Process().children())
    queue.schedule_async_request(AsyncRequest(time.sleep, [600], []))
    with pytest.raises(KeyError), queue:
        raise KeyError
    assert not [each for each in psutil.Process().children() if each not in before]


@pytest.mark.usefixtures("given_up_soon")
@pytest.mark.parametrize("error", [KeyError, SaveTimeoutError])
def test_an_error_in_the_block_is_not_held_up_by_storage_that_is(
    error: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves not written within ``exit_timeout_s`` are given up; written saves are committed.

    They are given up at once if a deadline has passed already, and no wait is announced.
    """
    nostall.configure(EngineOptions(exit_timeout_s=0.5 if error is KeyError else 60.0))
    queue = AsyncCallsQueue()
    with Hold("chunk") as hold:
        schedule(queue, tmp_path / "written", small_state(1))
        hold.stop(schedule, queue, tmp_path / "stuck", small_state(2))
        wait([queue._caller._calls[0].outcome])
        began = time.monotonic()
        with pytest.raises(error, match="mine") as raised, queue:
            raise error("mine")
    assert time.monotonic() - began < 30
    assert caplog.text.count("waiting up to") == (error is KeyError)
    if sys.version_info >= (3, 11):
        assert "requests were lost (pending: 2)" in raised.value.__notes__[0]
    assert queue.pending == 0
    assert not (tmp_path / "stuck" / ".metadata").exists()
    assert holds(tmp_path / "written", 1)


def test_full_storage_is_said_in_one_line(tmp_path: Path) -> None:
    """With the bytes that are needed and those that are free, and no other process's traceback."""
    with AsyncCallsQueue() as queue:
        with inject(Fault.errno("chunk", errno.ENOSPC)):
            schedule(queue, tmp_path, {"x": torch.zeros(25_000)})
        with pytest.raises(CheckpointException) as raised:
            queue.wait()
    error, _ = raised.value.failures[0]
    needed = re.search(r"this rank's files take (\d+) bytes; \d+ bytes and", str(error))
    assert needed is not None
    assert 100_000 <= int(needed[1]) < 110_000
    assert str(raised.value).count("\n") < 5


def test_saves_to_one_place_do_not_share_files(tmp_path: Path) -> None:
    """Each commits its own while others are written, fail or are given up; older files go."""
    with AsyncCallsQueue() as queue, AsyncCallsQueue() as other, Hold("chunk") as hold:
        schedule(queue, tmp_path, small_state(1))
        with inject(Fault.errno("chunk", errno.ENOSPC)):
            schedule(queue, tmp_path, small_state(2))
        hold.stop(schedule, queue, tmp_path, small_state(3))
        schedule(other, tmp_path, small_state(4))
        with pytest.raises(CheckpointException, match="No space left"):
            queue.poll()
        assert holds(tmp_path, 1)
        other.close(abort=True)
        assert holds(tmp_path, 1)
        hold.release()
        assert queue.wait() == [2]
    assert holds(tmp_path, 3)
    assert len(names(tmp_path)) == 2


# --- aborting -------------------------------------------------------------------------------------


def test_an_aborted_save_is_never_finalised(tmp_path: Path) -> None:
    """Neither at once nor later, and it leaves no file; the queue counts on and saves again."""
    finalized: list[str] = []
    with AsyncCallsQueue() as busy, AsyncCallsQueue() as queue, Hold() as hold:
        with inject(hold.fault):
            schedule(busy, tmp_path / "busy", small_state(1))
        schedule(queue, tmp_path / "aborted", small_state(2))
        queue.schedule_async_request(nothing(lambda: finalized.append("aborted")))
        queue.close(abort=True)
        assert queue.pending == 0
        assert queue.poll() == []
        hold.release()
        index = schedule(queue, tmp_path / "again", small_state(3))
        assert index == 2
        assert queue.wait() == [index]
        assert busy.wait() == [0]
    assert finalized == []
    assert names(tmp_path / "aborted") == []
    assert holds(tmp_path / "again", 3)


def test_a_late_answer_is_not_taken_for_another_saves(tmp_path: Path) -> None:
    """No aborted save is committed; the next one, of another structure, gets its own answer."""
    with AsyncCallsQueue() as queue, Hold("report") as hold, ThreadPoolExecutor(1) as pool:
        hold.stop(schedule, queue, tmp_path / "aborted", small_state(1))
        abort = pool.submit(queue.close, abort=True)
        hold.release()
        abort.result()
        other = {"other": torch.arange(5), **small_state(2)}
        assert schedule(queue, tmp_path / "again", other) == 1
        assert queue.wait() == [1]
    assert names(tmp_path / "aborted") == []
    assert set(read_metadata(tmp_path / "again").state_dict_metadata) >= {"other", "weight"}
    template = {"other": torch.zeros(5, dtype=torch.int64), **small_state(0)}
    assert loaded_wrong(tmp_path / "again", other, template) == []


@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_wait_that_another_thread_aborts_says_so(
    timeout: float | None, on_error: Literal["raise", "warn"], tmp_path: Path
) -> None:
    """By an error of its own kind; only what is scheduled after the abort began is finalised."""
    queue = AsyncCallsQueue(on_error=on_error)

    def waits(thread: threading.Thread) -> bool:
        return stands_in(thread, AsyncCallsQueue.wait) and stands_in(thread, is_done)

    with Hold("report") as hold, ThreadPoolExecutor(2) as pool:
        hold.stop(schedule, queue, tmp_path / "aborted", small_state(1))
        waiting = pool.submit(queue.wait, timeout)
        wait_until(lambda: any(map(waits, threading.enumerate())))
        aborting = pool.submit(abort_all)
        wait_until(lambda: queue.pending == 0)
        index = schedule(queue, tmp_path / "new", small_state(2))
        hold.release()
        error = waiting.exception()
        aborting.result()
    assert isinstance(error, SaveAbortedError)
    assert "request 0 was aborted by another thread" in str(error)
    assert queue.pending == 1
    assert queue.wait() == [index]
    queue.close()
    assert names(tmp_path / "aborted") == []
    assert holds(tmp_path / "new", 2)


# --- the caching reader ---------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path: Path) -> CachedMetadataFileSystemReader:
    """A caching reader of a checkpoint that has not been read yet."""
    dcp.save(small_state(1), storage_writer=FileSystemWriterAsync(tmp_path))
    return CachedMetadataFileSystemReader(tmp_path)


def test_metadata_is_read_once(reader: CachedMetadataFileSystemReader) -> None:
    """Readers of one checkpoint share what was read, until it is cleared; others read each time."""
    plain = CachedMetadataFileSystemReader(reader.path, cache_metadata=False)
    assert plain.shared_metadata() is not plain.shared_metadata()
    for path in (reader.path, None):
        kept = reader.shared_metadata()
        assert CachedMetadataFileSystemReader(reader.path).shared_metadata() is kept
        assert plain.shared_metadata() is not kept
        CachedMetadataFileSystemReader.clear_metadata_cache(path)
        assert reader.shared_metadata() is not kept


@pytest.mark.parametrize("reads", [0, 1])
def test_what_a_caller_does_to_metadata_stays_with_it(
    reader: CachedMetadataFileSystemReader, reads: int
) -> None:
    """Down to the chunks of a tensor, for the first one that reads it, too."""
    for _ in range(reads):
        reader.read_metadata()
    changed = reader.read_metadata()
    entry: Any = changed.state_dict_metadata["weight"]
    entry.chunks[0].offsets = torch.Size([1, 1])
    entry.chunks.clear()
    entry.properties.dtype = torch.int8
    for info in changed.storage_data.values():
        info.relative_path = "elsewhere"
    changed.planner_data.clear()
    unchanged, there = reader.read_metadata(), read_metadata(Path(reader.path))
    assert unchanged.state_dict_metadata == there.state_dict_metadata
    assert unchanged.storage_data == there.storage_data
    assert unchanged.planner_data == there.planner_data


def test_metadata_of_few_checkpoints_is_kept(tmp_path: Path) -> None:
    """The cache holds the metadata of the four checkpoints that were read last."""
    readers = []
    for number in range(5):
        path = tmp_path / str(number)
        save_now(path, {"a": torch.ones(3)})
        readers.append(CachedMetadataFileSystemReader(path))
    kept = [reader.shared_metadata() for reader in readers[:4]]
    for position in (0, 4):
        readers[position].shared_metadata()
    found = [readers[n].shared_metadata() is kept[n] for n in (0, 2, 3, 1)]
    assert found == [True, True, True, False]


def a_long_file(path: Path) -> None:
    path.touch()
    os.truncate(path, (2 << 30) + 1)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, a_long_file, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "directory", "too long", "device"],
)
def test_what_cannot_be_metadata_is_not_read(
    reader: CachedMetadataFileSystemReader, make: Callable[[Path], None]
) -> None:
    """A pipe, a device without an end, and a file too long each give a typed error at once."""
    path = Path(reader.path) / ".metadata"
    path.unlink()
    make(path)
    with pytest.raises(ReadError) as caught:
        reader.read_metadata()
    assert caught.value.path == str(path.resolve())


def test_an_overwritten_checkpoint_is_read_anew(reader: CachedMetadataFileSystemReader) -> None:
    """Another structure, the same again, and equal size and time are noticed; each one loads."""
    path = Path(reader.path)
    before = reader.read_metadata()
    stamp = (path / ".metadata").stat().st_mtime_ns
    for state in ({"other": torch.ones(3)}, small_state(2), small_state(3)):
        dcp.save(state, storage_writer=FileSystemWriterAsync(path))
        os.utime(path / ".metadata", ns=(stamp, stamp))
        after = reader.read_metadata()
        assert after.storage_data != before.storage_data
        assert after.storage_data == read_metadata(path).storage_data
        template = deepcopy(state)
        spoil(template)
        dcp.load(template, storage_reader=CachedMetadataFileSystemReader(path))
        assert differing(state, template) == []
        before = after


def test_metadata_of_one_rank_is_read_by_rank(tmp_path: Path) -> None:
    """A checkpoint saved without collectives is found under the rank's own name."""
    writer = FileSystemWriterAsync(tmp_path)
    dcp.save(small_state(1), storage_writer=writer, use_collectives=False)
    reader = CachedMetadataFileSystemReader(tmp_path)
    assert "weight" in reader.read_metadata(rank=0).state_dict_metadata
    with pytest.raises(FileNotFoundError):
        reader.read_metadata()
