"""The queue: what is scheduled is finalised once, in order, after all ranks, or not at all."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
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
from torch.distributed.checkpoint.metadata import Metadata

import nostall
from nostall._engine import Engine
from nostall._model.threads import is_done
from nostall._storage import posix
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
    NotDurableError,
    OptionError,
    ReadError,
    SaveAbortedError,
    SaveTimeoutError,
    StagingError,
    WriteError,
)
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
from nostall.torch_ckpt import TorchAsyncCheckpoint
from programs import calls, openers
from programs.entry_points import differing, loaded_wrong, spoil
from support.crashes import RecordingOs
from support.faults import Fault, Hold, inject, writer_pids
from support.ranks import run_ranks
from support.states import blobs, read_metadata, schedule, small_state
from support.waiting import HangingOs, stands_in, wait_until

Found = dict[str, Any]


def request(*finalize: Callable[[], Any]) -> AsyncRequest:
    """One with nothing to do in the background."""
    return AsyncRequest(None, [], list(finalize))


def names(path: Path) -> list[str]:
    """Names in a directory; none if it does not exist."""
    return sorted(p.name for p in path.iterdir()) if path.exists() else []


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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """The findings of ``queueing.two_ranks`` on each rank."""
    return run_ranks(2, "queueing:two_ranks", tmp_path_factory.mktemp("queue"))


def test_requests_of_all_kinds_are_finalised_in_order(found: list[Found]) -> None:
    """Requests of all kinds go through one queue, and their own indices come back.

    Own saves, ``torch.save`` on one rank, nothing at all, and a save that one rank has no part in.
    """
    for facts in found:
        said = facts["in_order"]
        assert said["scheduled"] == [0, 1, 2, 3, 4, 5]
        assert said["finalized"] == [0, 1, 2, 3, 4, 5]
        assert said["order"] == ["second", "third"]
        assert said["pending"] == [5, 0]
        assert said["archive"] == [0, 1, 2]
        assert said["files of fourth"] == [".metadata", "__0_0.distcp"]
        assert said["wrong"] == []


def test_two_queues_count_for_themselves(found: list[Found]) -> None:
    """Each queue counts from 0 and may be finalised before an older request of the other."""
    for facts in found:
        said = facts["two_queues"]
        assert said["scheduled"] == [0, 0, 1]
        assert said["finalized"] == [[0], [0, 1]]
        assert said["wrong"] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_full_storage_of_one_rank_fails_the_save_on_every_rank(
    rank: int, found: list[Found]
) -> None:
    """The error names rank, phase, file and cause everywhere, and nothing is committed.

    It says ``Worker failure`` on the coordinator. Nothing is left, and the saves before and after
    it are whole.
    """
    for here, facts in enumerate(found):
        said = facts["failures"][f"storage of rank {rank}"]
        assert said["ranks"] == [rank]
        assert "No space left on device" in said["text"]
        assert f"[rank={rank} phase=write path=" in said["text"]
        assert f"/failed/__{rank}_0.distcp]" in said["text"]
        assert ("Worker failure" in said["text"]) == (here == 0)
        assert said["left"] == []
        assert (said["pending"], said["after"]) == (1, [2])
        assert said["wrong"] == []


def test_a_snapshot_that_fails_on_one_rank_fails_the_save_on_every_rank(
    found: list[Found],
) -> None:
    """A rank that could not copy its tensors is reported like one that could not write them."""
    for facts in found:
        said = facts["failures"]["snapshot of rank 1"]
        assert said["ranks"] == [1]
        assert "ValueError: no luck [rank=1 phase=stage path=" in said["text"]
        assert said["left"] == []
        assert (said["pending"], said["after"]) == (1, [2])
        assert said["wrong"] == []


def test_a_finalize_function_that_raises_stops_those_after_it_and_no_later_request(
    found: list[Found],
) -> None:
    """The user's own exception is raised on its rank; the other rank, which is done, raises too."""
    here, there = (facts["failures"]["finalizer of rank 1"] for facts in reversed(found))
    assert (here["text"], here["finalized"], here["after"]) == ("no luck", [], [2])
    assert there["ranks"] == [1]
    assert "ValueError: no luck [rank=1 phase=finalize]" in there["text"]
    assert (there["finalized"], there["after"]) == (["failed"], [2])
    assert here["wrong"] + there["wrong"] == []


def test_a_python_worker_that_raises_or_dies_is_reported_on_every_rank(found: list[Found]) -> None:
    """The cause is named, be it an exception or an exit code, and the next save works."""
    for facts in found:
        said = facts["in_order"]["worker"]
        assert said["raises"]["ranks"] == said["dies"]["ranks"] == [1]
        assert "ValueError: no luck [rank=1 phase=write]" in said["raises"]["text"]
        assert "ended with exit code 17 [rank=1 phase=write]" in said["dies"]["text"]
        assert said["after"]


def test_a_rank_that_is_not_in_time_is_late_for_all(found: list[Found]) -> None:
    """``wait`` with a timeout raises on every rank if any rank's part is not done.

    It finalises nothing; a later wait does.
    """
    for here, facts in enumerate(found):
        said = facts["not_in_time"]
        assert f"{here} of 1 requests are not done on this rank after 0.2 s" in said["text"]
        assert said["early"] == []
        assert said["finalized"] == [0]
        assert said["wrong"] == []


def test_ranks_that_scheduled_different_numbers_raise(found: list[Found]) -> None:
    """All raise, with the indices, before anything is finalised; after an abort they go on."""
    for rank, facts in enumerate(found):
        said = facts["different_numbers"]
        assert f"rank {rank} polls number 0 and has scheduled up to {1 - rank}" in said["text"]
        assert "over all ranks these are 0 to 0 and 0 to 1" in said["text"]
        assert said["again"]
        assert said["wrong"] == []


def test_a_rank_that_does_not_poll_is_named_instead_of_waited_for(tmp_path: Path) -> None:
    """At the deadline, long before the process group's own, and by what it has scheduled."""
    said, _ = run_ranks(
        2, "endings:a_rank_that_does_not_poll_is_named_instead_of_waited_for", tmp_path
    )
    assert "other ranks did not poll within 2.0 s; this one has scheduled 1 requests" in said
    assert "ranks [1] have scheduled fewer requests ({1: 0})" in said


def test_torch_save_on_one_rank_needs_no_other(found: list[Found]) -> None:
    """``TorchAsyncCheckpoint`` is not collective unless asked to be."""
    assert [facts["only_one_rank"] for facts in found] == [{}, {"loaded": [1.0, 1.0]}]


def test_an_abort_ends_what_is_stuck_and_every_queue_goes_on(found: list[Found]) -> None:
    """A writer that does not answer is killed, and its save is never finalised.

    Nor is the one behind it, and neither leaves a file. The next saves of both queues are right.
    """
    for facts in found:
        assert facts["aborted_while_stuck"] == {
            "pending": [0, 0],
            "late": [],
            "finalized": [],
            "killed": True,
            "again": True,
            "left": [],
            "wrong": [],
        }


# --- requests -------------------------------------------------------------------------------------


def test_a_scheduled_request_takes_no_more_finalize_functions() -> None:
    """Freezing refuses them with an error; before, they are appended."""
    order: list[str] = []
    mine = request(lambda: order.append("first"))
    mine.add_finalize_fn(lambda: order.append("second"))
    frozen = mine.freeze()
    with pytest.raises(RuntimeError, match="finalize"):
        frozen.add_finalize_fn(lambda: order.append("third"))
    assert frozen._replace(call_idx=4).execute_finalize_fns() == 4
    assert order == ["first", "second"]


def test_a_request_can_be_executed_without_a_queue(tmp_path: Path) -> None:
    """Preload, call with arguments by position and name, finalize: in order, in this process."""
    order: list[Any] = []
    AsyncRequest(
        lambda *args, **kwargs: order.append((args, kwargs)),
        ("one", None),
        [lambda: order.append("finalized")],
        {"name": 3},
        lambda: "preloaded",
    ).execute_sync()
    assert order == [(("one", "preloaded"), {"name": 3}), "finalized"]


def test_what_is_preloaded_needs_its_place_among_the_arguments() -> None:
    """The error of a request with a preload function and one argument names what is missing."""
    taken: list[int] = []
    with pytest.raises(OptionError, match="at least two"):
        AsyncRequest(print, [0], [], preload_fn=lambda: taken.append(1)).execute_sync()
    assert not taken  # no snapshot for nothing


def test_a_path_among_the_import_paths_ends_no_request(
    tmp_path: Path, queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ignores what is not a string there; so do saves that need modules, and callables."""
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    schedule(queue, tmp_path / "plain", small_state(1))
    schedule(queue, tmp_path / "streamed", small_state(1), open_file=openers.open_and_sign)
    queue.schedule_async_request(AsyncRequest(os.mkdir, [str(tmp_path / "called")], []))
    queue.wait()
    assert names(tmp_path) == ["called", "plain", "streamed"]


def test_what_cannot_travel_is_refused_when_it_is_scheduled() -> None:
    """A lambda, and a function of the main script, raise at once by name; nothing is pending."""
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
        assert queue.schedule_async_request(request()) == 0


def test_the_save_function_refuses_to_travel(tmp_path: Path) -> None:
    """The error of nostall's own save function in another process says what to do instead."""
    writer = FileSystemWriterAsync(tmp_path)
    save_state_dict_async_plan(small_state(), writer)
    save_fn, _, args = writer.get_save_function_and_args()
    with pytest.raises(TypeError, match="AsyncCallsQueue"):
        deepcopy(save_fn)
    with pytest.raises(OptionError, match="preload_fn"):
        save_fn(*args)


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
    """Calls that are scheduled together run in processes of their own.

    One that is done is finalised while the other one still runs.
    """
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
    writer = FileSystemWriterAsync(tmp_path)
    planned = save_state_dict_async_plan(small_state(1), writer)
    save_fn, preload_fn, args = writer.get_save_function_and_args()
    assert caller.is_current_async_call_done()
    with Hold() as hold:
        with inject(hold.fault):
            caller.schedule_async_call(AsyncRequest(save_fn, args, [], preload_fn=preload_fn))
        assert not caller.is_current_async_call_done()
        assert not caller.sync_all_async_calls(is_alive=True)
        hold.release()
        assert caller.is_current_async_call_done(blocking=True)
    assert caller.sync_all_async_calls(is_alive=False)
    save_state_dict_async_finalize(*planned)
    caller.close()
    assert loaded_wrong(tmp_path, small_state(1), small_state(0)) == []


# --- waiting --------------------------------------------------------------------------------------


def test_nothing_is_finalised_before_it_is_written(tmp_path: Path) -> None:
    """While the writer stands still a poll returns nothing, and a wait with a timeout raises.

    There is no metadata until the writer goes on and the save is finalised.
    """
    with AsyncCallsQueue() as queue, Hold() as hold:
        with inject(hold.fault):
            index = schedule(queue, tmp_path, small_state(1))
        assert queue.poll() == []
        assert queue.maybe_finalize_async_calls(no_dist=True) == []
        began = time.monotonic()
        with pytest.raises(SaveTimeoutError, match="1 of 1 requests") as raised:
            queue.wait(timeout=0.05)
        assert time.monotonic() - began < 5
        assert raised.value.hint is not None
        assert queue.pending == queue.get_num_unfinalized_calls() == 1
        assert not (tmp_path / ".metadata").exists()
        hold.release()
        assert queue.wait(timeout=60) == [index]
        assert queue.pending == 0
        assert queue.wait(timeout=0) == []
    assert loaded_wrong(tmp_path, small_state(1), small_state(0)) == []


def test_leaving_the_block_finalises_what_is_scheduled(tmp_path: Path) -> None:
    """The end of a ``with`` block waits for all saves; the queue can be used and closed again."""
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "1", small_state(1))
    assert loaded_wrong(tmp_path / "1", small_state(1), small_state(0)) == []
    assert schedule(queue, tmp_path / "2", small_state(2)) == 1
    assert queue.wait() == [1]
    queue.close()
    queue.close(abort=True)


def test_an_error_in_the_block_is_the_one_that_is_raised(tmp_path: Path) -> None:
    """No failed save hides the body's own exception; a note says what is lost.

    Nor does what is finalised behind it.
    """
    finalized: list[str] = []
    queue = AsyncCallsQueue()
    with inject(Fault.errno("chunk", errno.ENOSPC)):
        schedule(queue, tmp_path, small_state(1))
    queue.schedule_async_request(request(lambda: finalized.append("it")))
    with pytest.raises(KeyError, match="mine") as raised, queue:
        raise KeyError("mine")
    assert queue.pending == 0
    assert finalized == ["it"]
    assert names(tmp_path) == []
    if sys.version_info >= (3, 11):
        assert "No space left on device" in raised.value.__notes__[0]


@contextmanager
def released_in(hold: Hold, function: Callable[..., Any]) -> Iterator[None]:
    """Release what is held when this thread is in a function."""
    here = threading.current_thread()

    def release() -> None:
        wait_until(lambda: stands_in(here, function))
        hold.release()

    thread = threading.Thread(target=release)
    thread.start()
    yield
    thread.join()


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_ctrl_c_while_requests_are_aborted_leaves_none_of_them(tmp_path: Path) -> None:
    """It interrupts the wait for one; the others are aborted all the same."""
    queue, here = AsyncCallsQueue(), threading.current_thread()

    def strike() -> None:
        wait_until(lambda: stands_in(here, Engine.cancel) and stands_in(here, is_done))
        os.kill(os.getpid(), signal.SIGINT)

    with Hold("chunk") as hold:
        with inject(hold.fault):
            schedule(queue, tmp_path / "one", small_state(1))
        schedule(queue, tmp_path / "other", small_state(2))
        hold.wait_reached()
        thread = threading.Thread(target=strike)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            queue.close(abort=True)
        thread.join()
        hold.release()
    assert queue.pending == 0
    wait_until(lambda: nostall.status() == ())
    assert not (tmp_path / "other" / ".metadata").exists()


@pytest.mark.parametrize("when", ["written", "being written"])
def test_an_error_in_the_block_does_not_cost_a_checkpoint(when: str, tmp_path: Path) -> None:
    """One that is written is committed, and one that is being written as well when it is."""
    queue = AsyncCallsQueue()
    with Hold("chunk") as hold:
        with inject(*[hold.fault] if when == "being written" else []):
            schedule(queue, tmp_path, small_state(1))
        if when == "written":
            wait([call.outcome for call in queue._caller._calls])
        release = released_in(hold, AsyncCallsQueue.__exit__)
        with (
            release if when == "being written" else nullcontext(),
            pytest.raises(KeyError, match="mine"),
            queue,
        ):
            raise KeyError("mine")
    assert queue.pending == 0
    assert loaded_wrong(tmp_path, small_state(1), small_state(0)) == []


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
    error: type[Exception], tmp_path: Path
) -> None:
    """Saves not written within ``exit_timeout_s`` are given up; written saves are committed.

    They are given up at once if a deadline has passed already.
    """
    nostall.configure(EngineOptions(exit_timeout_s=0.5 if error is KeyError else 60.0))
    queue = AsyncCallsQueue()
    with Hold("chunk") as hold:
        schedule(queue, tmp_path / "written", small_state(1))
        with inject(hold.fault):
            schedule(queue, tmp_path / "stuck", small_state(2))
        hold.wait_reached()
        wait([queue._caller._calls[0].outcome])
        began = time.monotonic()
        with pytest.raises(error, match="mine") as raised, queue:
            raise error("mine")
    assert time.monotonic() - began < 30
    if sys.version_info >= (3, 11):
        assert "requests were lost, of 2 that were pending" in raised.value.__notes__[0]
    assert queue.pending == 0
    assert not (tmp_path / "stuck" / ".metadata").exists()
    assert loaded_wrong(tmp_path / "written", small_state(1), small_state(0)) == []


def test_errors_on_all_ranks_do_not_cost_a_checkpoint(found: list[Found]) -> None:
    """Ranks that leave with an exception together commit what is written.

    One that leaves alone gives it up, talks to no rank that goes on, and its exception gets to
    where it is handled.
    """
    for facts in found:
        together, alone = (facts["errors_in_the_block"][how] for how in ("together", "alone"))
        assert together == {"raised": "mine", "is complete": True, "wrong": []}
        assert (alone["raised"], alone["is complete"]) == ("mine", False)
    if sys.version_info >= (3, 11):
        assert (
            "ranks [0] did not exit with an exception"
            in found[1]["errors_in_the_block"]["alone"]["note"]
        )


def test_finalize_functions_never_run_after_a_failure(tmp_path: Path) -> None:
    """A failed request's own are skipped for good; those of later requests run in their turn."""
    finalized: list[str] = []
    with AsyncCallsQueue() as queue:
        with inject(Fault.raising("report", "no luck")):
            schedule(queue, tmp_path / "1", small_state(1))
        queue.schedule_async_request(request(lambda: finalized.append("later")))
        with pytest.raises(CheckpointException, match="no luck"):
            queue.wait()
        assert finalized == []
        assert queue.poll() == [1]
    assert finalized == ["later"]
    assert names(tmp_path / "1") == []


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
    """Two saves to one directory may be under way together; each commits its own checkpoint.

    While the other is being written, fails or is given up. What the last one replaces is removed.
    """
    with AsyncCallsQueue() as queue, AsyncCallsQueue() as other, Hold("chunk") as hold:
        schedule(queue, tmp_path, small_state(1))
        with inject(Fault.errno("chunk", errno.ENOSPC)):
            schedule(queue, tmp_path, small_state(2))
        with inject(hold.fault):
            schedule(queue, tmp_path, small_state(3))
        hold.wait_reached()
        schedule(other, tmp_path, small_state(4))
        with pytest.raises(CheckpointException, match="No space left"):
            queue.poll()
        assert loaded_wrong(tmp_path, small_state(1), small_state(0)) == []
        other.close(abort=True)
        assert loaded_wrong(tmp_path, small_state(1), small_state(0)) == []
        hold.release()
        assert queue.wait() == [2]
    assert loaded_wrong(tmp_path, small_state(3), small_state(0)) == []
    assert len(names(tmp_path)) == 2


# --- aborting -------------------------------------------------------------------------------------


def test_an_aborted_save_is_never_finalised(tmp_path: Path) -> None:
    """Neither at once nor later, and it leaves no file; the queue counts on and saves again."""
    finalized: list[str] = []
    with AsyncCallsQueue() as busy, AsyncCallsQueue() as queue, Hold() as hold:
        with inject(hold.fault):
            schedule(busy, tmp_path / "busy", small_state(1))
        schedule(queue, tmp_path / "aborted", small_state(2))
        queue.schedule_async_request(request(lambda: finalized.append("aborted")))
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
    assert loaded_wrong(tmp_path / "again", small_state(3), small_state(0)) == []


def test_aborting_one_queue_does_not_touch_anothers_save(tmp_path: Path) -> None:
    """A save that is being written goes on while one that waits behind it is aborted.

    By the same process and for however long.
    """
    with AsyncCallsQueue() as busy, AsyncCallsQueue() as queue, Hold("chunk") as hold:
        with inject(hold.fault):
            schedule(busy, tmp_path / "busy", small_state(1))
        hold.wait_reached()
        (writer,) = writer_pids()
        schedule(queue, tmp_path / "aborted", small_state(2))
        began = time.monotonic()
        queue.close(abort=True)
        assert time.monotonic() - began < 4
        assert writer_pids() == [writer]
        hold.release()
        assert busy.wait() == [0]
    assert loaded_wrong(tmp_path / "busy", small_state(1), small_state(0)) == []


def test_a_late_answer_is_not_taken_for_another_saves(tmp_path: Path) -> None:
    """An aborted save that was written nevertheless is not committed.

    The next one, of another structure and to another place, gets the answer that is its own.
    """
    with AsyncCallsQueue() as queue, Hold("report") as hold:
        with inject(hold.fault):
            schedule(queue, tmp_path / "aborted", small_state(1))
        hold.wait_reached()
        abort = threading.Thread(target=queue.close, kwargs={"abort": True})
        abort.start()
        hold.release()
        abort.join()
        other = {"other": torch.arange(5), **small_state(2)}
        assert schedule(queue, tmp_path / "again", other) == 1
        assert queue.wait() == [1]
    assert names(tmp_path / "aborted") == []
    assert set(read_metadata(tmp_path / "again").state_dict_metadata) >= {"other", "weight"}
    template = {"other": torch.zeros(5, dtype=torch.int64), **small_state(0)}
    assert loaded_wrong(tmp_path / "again", other, template) == []


def test_abort_all_aborts_every_queue(tmp_path: Path) -> None:
    """Requests of every live queue are given up, and each queue can be used again."""
    finalized: list[str] = []
    queues = [AsyncCallsQueue(), AsyncCallsQueue(persistent=False)]
    for number, queue in enumerate(queues):
        schedule(queue, tmp_path / str(number), small_state(number))
        queue.schedule_async_request(request(lambda: finalized.append("it")))
    abort_all()
    assert [queue.pending for queue in queues] == [0, 0]
    for number, queue in enumerate(queues):
        assert queue.wait() == []
        assert not (tmp_path / str(number) / ".metadata").exists()
        index = schedule(queue, tmp_path / f"{number} again", small_state(number))
        assert queue.wait() == [index] == [2]
        queue.close()
    assert finalized == []


@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_wait_that_another_thread_aborts_says_so(
    timeout: float | None, on_error: Literal["raise", "warn"], tmp_path: Path
) -> None:
    """The thread that waits gets an error of its own kind.

    What was scheduled after the abort had begun is finalised, and nothing else.
    """
    outcome: list[Any] = []
    queue = AsyncCallsQueue(on_error=on_error)

    def finalize() -> None:
        try:
            outcome.append(queue.wait(timeout))
        except Exception as error:
            outcome.append(error)

    with Hold("report") as hold:
        with inject(hold.fault):
            schedule(queue, tmp_path / "aborted", small_state(1))
        hold.wait_reached()
        waiting = threading.Thread(target=finalize)
        waiting.start()
        wait_until(lambda: stands_in(waiting, is_done))
        aborting = threading.Thread(target=abort_all)
        aborting.start()
        wait_until(lambda: queue.pending == 0)
        index = schedule(queue, tmp_path / "new", small_state(2))
        hold.release()
        waiting.join()
        aborting.join()
    assert [type(each) for each in outcome] == [SaveAbortedError], outcome
    assert "request 0 was aborted by another thread" in str(outcome[0])
    assert queue.pending == 1
    assert queue.wait() == [index]
    queue.close()
    assert names(tmp_path / "aborted") == []
    assert loaded_wrong(tmp_path / "new", small_state(2), small_state(0)) == []


# --- torch.save -----------------------------------------------------------------------------------


def archive(value: Any, **options: Any) -> bytes:
    """The bytes that ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "options",
    [{}, {"pickle_protocol": 4}],
    ids=["defaults", "protocol 4"],
)
def test_a_file_holds_what_torch_save_writes(options: dict[str, Any], tmp_path: Path) -> None:
    """Byte for byte, with ``torch.save``'s arguments, and as things were when the call returned."""
    state = small_state(1)
    expected = archive(small_state(1), **options)
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save(state, tmp_path / "state.pt", **options)
    spoil(state)
    state["nested"]["list"].append("late")
    checkpoint.finalize_async_save(blocking=True)
    checkpoint.close()
    assert (tmp_path / "state.pt").read_bytes() == expected
    assert names(tmp_path) == ["state.pt"]


class Held:
    """An object whose pickling waits."""

    begun = threading.Event()
    goes_on = threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        self.begun.set()
        assert self.goes_on.wait(60)
        return Held, ()


def test_a_save_that_was_aborted_replaces_no_file(tmp_path: Path) -> None:
    """Also one whose state was still being copied, on another thread."""
    path, failures = tmp_path / "state.pt", []
    path.write_bytes(b"earlier")
    checkpoint = TorchAsyncCheckpoint()

    def save() -> None:
        try:
            checkpoint.async_save({"held": Held(), "tensor": torch.ones(3)}, path)
        except SaveAbortedError as error:
            failures.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    assert Held.begun.wait(60)
    abort_all()
    Held.goes_on.set()
    thread.join()
    assert len(failures) == 1
    checkpoint.async_save(small_state(1), tmp_path / "later.pt")  # jobs are done in turn
    checkpoint.close()
    for each in threading.enumerate():
        if each.name == "nostall-placing":
            each.join()
    assert path.read_bytes() == b"earlier"
    assert names(tmp_path) == ["later.pt", "state.pt"]


def test_a_file_keeps_the_mode_and_owner_of_the_one_it_replaces(tmp_path: Path) -> None:
    """A checkpoint that only its owner may read stays so, as with ``torch.save``."""
    path = tmp_path / "state.pt"
    path.write_bytes(b"earlier")
    path.chmod(0o2600)
    if os.geteuid() == 0:
        os.chown(path, 12345, 23456)
    before = path.stat()
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save(small_state(1), path)
    checkpoint.close()
    after = path.stat()
    assert path.read_bytes() == archive(small_state(1))
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )


@pytest.mark.parametrize("kind", ["FIFO", "device", "socket"])
def test_only_a_regular_file_is_replaced(tmp_path: Path, kind: str) -> None:
    """A device, a FIFO or a socket is an error that names it, and stays what it is."""
    path = tmp_path / "special"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
        except PermissionError:
            pytest.skip("this user may not make devices")
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(os.path.relpath(path))
        listening.close()
    before = path.stat()
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save(small_state(1), path)
    with pytest.raises(CheckpointException, match="a device, a FIFO or a socket") as raised:
        checkpoint.close()
    error = raised.value.failures[0][0]
    assert isinstance(error, WriteError)
    assert error.path == str(path)
    assert "regular file" in str(error.hint)
    assert path.stat() == before
    assert names(tmp_path) == ["special"]


def test_a_file_can_have_the_longest_name(tmp_path: Path) -> None:
    """That of the file that is written first is no longer."""
    path = tmp_path / ("ä" * 127)  # of 255 bytes at most
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save(small_state(1), path)
    checkpoint.close()
    assert names(tmp_path) == [path.name]


def test_a_file_can_have_the_old_format(tmp_path: Path) -> None:
    """Formats that ``torch.save`` cannot measure without writing them are saved as well."""
    path = tmp_path / "state.pt"
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save(small_state(1), path, _use_new_zipfile_serialization=False)
    checkpoint.close()
    assert differing(torch.load(path), small_state(1)) == []
    assert path.read_bytes()[:2] == b"\x80\x02"  # a pickle, not an archive


class LateOs:
    """A system that renames and then reports an error, as a server whose answer is lost."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_that_got_its_name_is_saved_whatever_storage_answers(tmp_path: Path) -> None:
    """An error after the rename is not reported as a failed save whose file is there."""
    checkpoint = TorchAsyncCheckpoint()
    with patch.object(posix, "os", LateOs()):
        checkpoint.async_save(small_state(1), tmp_path / "state.pt")
        checkpoint.finalize_async_save(blocking=True)
    checkpoint.close()
    assert (tmp_path / "state.pt").read_bytes() == archive(small_state(1))
    assert names(tmp_path) == ["state.pt"]


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    """While it is written its name shows the earlier file, if any; afterwards the new one."""
    path = tmp_path / "state.pt"
    checkpoint = TorchAsyncCheckpoint(persistent_queue=False)
    for earlier, number in ((None, 1), (archive(small_state(1)), 2)):
        with Hold("fsync") as hold:
            with inject(hold.fault):
                checkpoint.async_save(small_state(number), f=str(path))
            hold.wait_reached()
            checkpoint.finalize_async_save()
            assert (path.read_bytes() if path.exists() else None) == earlier
            hold.release()
            checkpoint.finalize_async_save(blocking=True)
        assert path.read_bytes() == archive(small_state(number))
        assert names(tmp_path) == ["state.pt"]
    checkpoint.close()


def test_a_failed_file_leaves_the_earlier_one(tmp_path: Path) -> None:
    """A full device is an error that names the file; the earlier file stays.

    The next save works.
    """
    path = tmp_path / "state.pt"
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save(small_state(1), path)
    checkpoint.finalize_async_save(blocking=True)
    with inject(Fault.errno("chunk", errno.ENOSPC)):
        checkpoint.async_save(small_state(2), path)
    with pytest.raises(CheckpointException, match=r"No space left on device.*state\.pt"):
        checkpoint.finalize_async_save(blocking=True)
    assert path.read_bytes() == archive(small_state(1))
    assert names(tmp_path) == ["state.pt"]
    checkpoint.async_save(small_state(3), path)
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert path.read_bytes() == archive(small_state(3))


def test_what_cannot_be_pickled_fails_with_the_files_name(tmp_path: Path) -> None:
    """The error is raised when the save is finalised, as other ranks may wait for this one."""
    path = tmp_path / "state.pt"
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"x": lambda: 0}, path)
    with pytest.raises(CheckpointException, match=r"phase=stage.*state\.pt"):
        checkpoint.finalize_async_save(blocking=True)
    assert names(tmp_path) == []
    checkpoint.close()


def test_an_aborted_file_does_not_appear(tmp_path: Path) -> None:
    """``close(abort=True)`` gives up what is under way, ``close()`` waits; both may be repeated."""
    checkpoint = TorchAsyncCheckpoint()
    with AsyncCallsQueue() as busy, Hold() as hold:
        with inject(hold.fault):
            schedule(busy, tmp_path / "busy", small_state(1))
        checkpoint.async_save(small_state(2), tmp_path / "aborted.pt")
        checkpoint.close(abort=True)
        hold.release()
    checkpoint.async_save(small_state(3), tmp_path / "kept.pt")
    checkpoint.close()
    checkpoint.close()
    assert names(tmp_path) == ["busy", "kept.pt"]


class _Countdown:
    """Is pickled in another way every time."""

    def __init__(self, number: int, by: int) -> None:
        self.number = number
        self._by = by

    def __reduce__(self) -> Any:
        self.number -= self._by
        return bytes, (b"x" * self.number,)


def test_a_file_ends_where_its_archive_ends(tmp_path: Path) -> None:
    """An object that is pickled longer or shorter each time leaves no older bytes in the file.

    Nothing of what was in memory before is in it, and what does not fit is an error that says why.
    """
    path = tmp_path / "state.pt"
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"x": b"earlier" * 10_000}, path)
    checkpoint.async_save({"x": _Countdown(30_000, by=10_000)}, path)
    checkpoint.finalize_async_save(blocking=True)
    assert path.read_bytes() == archive({"x": _Countdown(20_000, by=10_000)})
    checkpoint.async_save({"x": _Countdown(30_000, by=-10_000)}, path)
    with pytest.raises(CheckpointException, match=r"pickled differently each time") as raised:
        checkpoint.finalize_async_save(blocking=True)
    assert isinstance(raised.value.failures[0][0], StagingError)
    assert path.read_bytes() == archive({"x": _Countdown(20_000, by=10_000)})
    checkpoint.close()


def test_a_file_in_new_directories_is_durable_with_their_names(tmp_path: Path) -> None:
    """The names of directories made for it are on the device before the file has its own."""
    checkpoint = TorchAsyncCheckpoint()
    with patch.object(posix, "os", RecordingOs()) as recorded:
        checkpoint.async_save(small_state(), tmp_path / "new" / "deep" / "state.pt")
        checkpoint.close()
    done = [(each.name, Path(each.path).name) for each in recorded.operations]
    assert done == [("fsync", "new"), ("rename", done[1][1]), ("fsync", "deep")]


def test_a_file_whose_name_does_not_get_to_the_device_does_not_hold_up_others(
    tmp_path: Path,
) -> None:
    """While storage does not answer for one directory, saves to others are finalised."""
    checkpoint = TorchAsyncCheckpoint()
    storage = HangingOs("fsync", "/stuck")
    (tmp_path / "stuck").mkdir()
    with patch.object(posix, "os", storage), AsyncCallsQueue() as queue:
        checkpoint.async_save(small_state(1), tmp_path / "stuck" / "state.pt")
        assert storage.is_reached.wait(60)
        schedule(queue, tmp_path / "other", small_state(2))
        try:
            assert queue.wait(timeout=10) == [0]
            checkpoint.finalize_async_save()
            assert checkpoint._queue.pending == 1
        finally:
            storage.answer()
        checkpoint.close()
    assert (tmp_path / "stuck" / "state.pt").read_bytes() == archive(small_state(1))


def test_saves_to_one_file_are_put_in_place_in_order(tmp_path: Path) -> None:
    """An earlier one that storage holds up does not replace a later one."""
    checkpoint = TorchAsyncCheckpoint()
    path = tmp_path / "directory" / "state.pt"
    path.parent.mkdir()
    storage = HangingOs("fsync", f"/{tmp_path.name}")
    try:
        with patch.object(posix, "os", storage):
            checkpoint.async_save(small_state(1), path)
            assert storage.is_reached.wait(60)
        checkpoint.async_save(small_state(2), path)
        wait_until(lambda: path.exists() or any(stands_in(t, is_done) for t in placing()))
        assert not path.exists()
    finally:
        storage.answer()
    checkpoint.close()
    assert path.read_bytes() == archive(small_state(2))


def placing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nostall-placing"]


class _RefusingOs(RecordingOs):
    """A system that makes the names in one directory not durable."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def fsync(self, fd: int) -> None:
        if os.path.samefile(f"/proc/self/fd/{fd}", self._directory):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(fd)


def test_a_file_that_may_not_last_says_so_by_its_type(tmp_path: Path) -> None:
    """Where the device refuses to make its name durable, the new file is there."""
    checkpoint = TorchAsyncCheckpoint()
    with patch.object(posix, "os", _RefusingOs(tmp_path)):
        checkpoint.async_save(small_state(1), tmp_path / "state.pt")
        with pytest.raises(CheckpointException, match="may not survive") as raised:
            checkpoint.finalize_async_save(blocking=True)
    assert isinstance(raised.value.failures[0][0], NotDurableError)
    assert names(tmp_path) == ["state.pt"]


def test_only_a_path_can_be_written_in_the_background(tmp_path: Path) -> None:
    """A stream is refused where it is passed."""
    checkpoint = TorchAsyncCheckpoint()
    with pytest.raises(OptionError, match=r"BytesIO.*pass a path"):
        checkpoint.async_save({}, io.BytesIO())  # type: ignore[arg-type]  # on purpose
    with pytest.raises(OptionError, match="pass a path"):
        checkpoint.async_save({})  # type: ignore[call-arg]  # on purpose


def test_what_is_no_request_no_writer_or_no_time_is_refused_by_its_name(tmp_path: Path) -> None:
    """Where it is passed, and not by an attribute that it lacks."""
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


def test_files_and_checkpoints_take_turns_in_the_same_memory(tmp_path: Path) -> None:
    """A ``torch.save`` between two saves of one structure does not show in the second one."""
    state = {"a": torch.arange(4.0)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock"))
    with AsyncCallsQueue() as queue:
        for number in range(3):
            schedule(queue, tmp_path / str(number), state)
            queue.wait()
            checkpoint = TorchAsyncCheckpoint()
            checkpoint.async_save({"x": torch.ones(9)}, tmp_path / "x.pt")
            checkpoint.close()
    for number in range(3):
        assert blobs(tmp_path / str(number)) == blobs(tmp_path / "stock")


# --- the caching reader ---------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path: Path) -> CachedMetadataFileSystemReader:
    """A caching reader of a checkpoint that has not been read yet."""
    dcp.save(small_state(1), storage_writer=FileSystemWriterAsync(tmp_path))
    return CachedMetadataFileSystemReader(tmp_path)


def test_metadata_is_read_once(reader: CachedMetadataFileSystemReader) -> None:
    """Readers of one checkpoint share what was read, in containers of their own, until cleared."""
    first = reader.read_metadata()
    second = CachedMetadataFileSystemReader(reader.path).read_metadata()
    assert second.storage_data == first.storage_data
    kept = _index(reader)
    second.state_dict_metadata.clear()
    second.storage_data.clear()
    third = reader.read_metadata()
    assert third.state_dict_metadata == first.state_dict_metadata
    assert third.storage_data == first.storage_data
    CachedMetadataFileSystemReader.clear_metadata_cache(reader.path)
    assert _index(reader) is not kept
    kept = _index(reader)
    CachedMetadataFileSystemReader.clear_metadata_cache()
    assert _index(reader) is not kept


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
        dcp.save({"a": torch.ones(3)}, storage_writer=FileSystemWriterAsync(path), no_dist=True)
        readers.append(CachedMetadataFileSystemReader(path))
    kept = [_index(reader) for reader in readers[:4]]
    assert _index(readers[0]) is kept[0]
    _index(readers[4])
    assert [_index(readers[n]) is kept[n] for n in (0, 2, 3, 1)] == [True, True, True, False]


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "too long"])
def test_what_cannot_be_metadata_is_not_read(
    reader: CachedMetadataFileSystemReader, kind: str
) -> None:
    """A pipe, a device without an end, and a file too long each give a typed error at once."""
    path = Path(reader.path) / ".metadata"
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case _:
            path.touch()
            os.truncate(path, (2 << 30) + 1)
    with pytest.raises(ReadError) as caught:
        reader.read_metadata()
    assert caught.value.path == str(path.resolve())


def test_a_reader_that_does_not_cache_reads_each_time(
    reader: CachedMetadataFileSystemReader,
) -> None:
    """``cache_metadata=False`` neither uses nor fills the cache."""
    cached = _index(reader)
    plain = CachedMetadataFileSystemReader(reader.path, cache_metadata=False)
    assert _index(plain) is not _index(plain)
    assert _index(reader) is cached


def _index(reader: CachedMetadataFileSystemReader) -> Metadata:
    """Shared metadata: one object for all readers of a checkpoint while it is cached."""
    return reader.shared_metadata()


def test_an_overwritten_checkpoint_is_read_anew(reader: CachedMetadataFileSystemReader) -> None:
    """Another structure, the same again, and metadata of equal size and time are all noticed.

    The checkpoint loads with this reader after each.
    """
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
