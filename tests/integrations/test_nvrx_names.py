"""Names and behaviours beyond the signatures that programs written for NVRx rely on."""

from __future__ import annotations

import os
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import nostall
from nostall.core import AsyncCallsQueue, AsyncRequest, abort_nvrx_checkpoint
from nostall.errors import OptionError, SaveAbortedError
from nostall.filesystem_async import FileSystemWriterAsync, get_write_results_queue
from nostall.state_dict_saver import CheckpointMetadataCache
from nostall.torch_ckpt import TorchAsyncCheckpoint
from programs import calls
from programs.entry_points import loaded_wrong
from programs.queueing import nothing
from support.faults import Hold, writer_pids
from support.processes import command_of, descendants
from support.ranks import on_ranks
from support.states import planned, schedule, small_state
from support.waiting import stands_in, wait_until


def test_a_torch_checkpoint_also_saves_in_the_foreground(tmp_path: Path) -> None:
    """``TorchAsyncCheckpoint.save`` writes what ``async_save`` writes, before it returns."""
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.save(small_state(1), tmp_path / "now")
    loaded = torch.load(tmp_path / "now")
    checkpoint.async_save(small_state(1), tmp_path / "later")
    checkpoint.finalize_async_save(blocking=True)
    checkpoint.close()
    assert torch.equal(loaded["weight"], torch.load(tmp_path / "later")["weight"])


def test_every_queue_of_the_process_can_be_listed() -> None:
    """``get_instances`` has the queues that exist, and no others."""
    queues = [AsyncCallsQueue(), AsyncCallsQueue(persistent=False)]
    assert set(queues) <= set(AsyncCallsQueue.get_instances())
    gone = queues.pop()
    identity = id(gone)
    del gone
    assert identity not in map(id, AsyncCallsQueue.get_instances())


def test_the_scheduled_requests_can_be_unpacked(tmp_path: Path) -> None:
    """``async_calls`` has index, caller and request of each, first to last, until finalised."""
    with AsyncCallsQueue() as queue:
        assert len(queue.async_calls) == 0
        schedule(queue, tmp_path, small_state(1))
        queue.schedule_async_request(nothing())
        assert [idx for idx, _, _ in queue.async_calls] == [0, 1]
        first = queue.async_calls[0]
        assert first.async_caller is queue.persistent_caller
        assert (first.async_request.is_frozen, first.async_request.call_idx) == (True, 0)
        assert len(first.async_request.finalize_fns) == 1
        queue.wait()
        assert not queue.async_calls


def test_the_persistent_caller_is_there_while_it_is_in_use() -> None:
    """``persistent_caller`` is ``None`` before the first request and after ``close``."""
    for abort in (False, True):
        queue = AsyncCallsQueue()
        assert queue.persistent_caller is None
        queue.schedule_async_request(nothing())
        assert queue.persistent_caller is not None
        queue.close(abort=abort)
        assert queue.persistent_caller is None
    temporal = AsyncCallsQueue(persistent=False)
    temporal.schedule_async_request(nothing())
    assert temporal.persistent_caller is None
    temporal.close()


def test_clearing_tensor_caches_costs_no_save(tmp_path: Path) -> None:
    """``cleanup_tensor_caches`` may be called at any time, also while a save is being written."""
    with AsyncCallsQueue() as queue:
        for number in range(2):
            schedule(queue, tmp_path / str(number), small_state(number))
            FileSystemWriterAsync.cleanup_tensor_caches()
            queue.wait()
            wrong = loaded_wrong(tmp_path / str(number), small_state(number), small_state(9))
            assert wrong == []


def test_the_manager_of_the_results_queue_can_be_shut_down(tmp_path: Path) -> None:
    """``_manager.shutdown()``, as before a restart; saves and the queue work afterwards."""
    results: Any = get_write_results_queue("fork")
    results._manager.shutdown()
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path, small_state(1))
        assert queue.wait() == [0]
    get_write_results_queue().put("still usable")
    assert results.get_nowait() == "still usable"


def test_a_request_can_be_passed_by_nvrxs_keyword() -> None:
    """``async_request=``, as ``request=``; not both."""
    with AsyncCallsQueue() as queue:
        schedule_any: Any = queue.schedule_async_request
        assert schedule_any(async_request=nothing()) == 0
        assert schedule_any(request=nothing()) == 1
        with pytest.raises(TypeError, match="multiple values"):
            schedule_any(nothing(), async_request=nothing())


def test_metadata_can_be_passed_by_nvrxs_keyword() -> None:
    """``cached_global_metadata=``, as ``metadata=``."""
    adopt: Any = CheckpointMetadataCache().set_cached_global_metadata
    adopt(cached_global_metadata=None)
    adopt(metadata=None)


@dataclass
class RequestObject:
    """Three fields and no tuple."""

    async_fn: Any
    async_fn_args: Any
    finalize_fns: list[Any] = field(default_factory=list)


def test_a_request_of_another_class_is_taken_by_its_fields(tmp_path: Path) -> None:
    """Named tuples of three to seven fields, and objects; without three, it is refused."""
    order: list[int] = []
    with AsyncCallsQueue() as queue:
        schedule_any: Any = queue.schedule_async_request
        for count in range(3, 8):
            arguments = [torch.tensor(count), str(tmp_path / str(count))]
            finalize = [lambda count=count: order.append(count)]
            values = [torch.save, arguments, finalize, {}, None, True, 41]
            kind = namedtuple("AsyncRequest", AsyncRequest._fields[:count])  # type: ignore[misc]  # made in the test
            assert schedule_any(kind(*values[:count])) == count - 3
        theirs = RequestObject(torch.save, [torch.tensor(8), str(tmp_path / "8")])
        assert schedule_any(theirs) == 5
        del theirs.finalize_fns
        with pytest.raises(OptionError, match="RequestObject cannot be scheduled: it has no final"):
            schedule_any(theirs)
        assert queue.wait() == [0, 1, 2, 3, 4, 5]
    assert order == [3, 4, 5, 6, 7]
    assert [int(torch.load(tmp_path / str(count))) for count in range(3, 9)] == [3, 4, 5, 6, 7, 8]


def test_arguments_of_nvrxs_node_local_staging(tmp_path: Path) -> None:
    """Files go to the path, with a warning; a timeout keeps a save (its pull request 373)."""
    with pytest.warns(UserWarning, match="staging_dir has no effect"):
        writer, request = planned(tmp_path / "a", small_state(), staging_dir=tmp_path / "local")
    request = request._replace(flush_dst=writer.flush_dst)
    with AsyncCallsQueue() as queue, Hold("chunk") as hold:
        hold.stop(queue.schedule_async_request, request)
        assert queue.maybe_finalize_async_calls(blocking=True, finalize_timeout=0.1) == []
        assert not queue._caller.is_current_async_call_done(True, finalize_timeout=0.1)
        hold.release()
        assert queue.maybe_finalize_async_calls(True, finalize_timeout=60.0) == [0]
        with pytest.raises(OptionError, match="needs NVRx's own queue"):
            queue.schedule_async_request(nothing()._replace(flush_dst="/lustre/a"))
    assert nostall.verify(tmp_path / "a").ok
    assert not (tmp_path / "local").exists()


def test_indices_start_again_after_a_close() -> None:
    """``close()`` ends a sequence; the next request is number 0 again. An abort does not."""
    queue = AsyncCallsQueue()
    for _ in range(2):
        assert [queue.schedule_async_request(nothing()) for _ in range(3)] == [0, 1, 2]
        assert queue.wait() == [0, 1, 2]
        queue.close()
    queue.schedule_async_request(nothing())
    queue.close(abort=True)
    assert queue.schedule_async_request(nothing()) == 1
    queue.close()


@on_ranks("queueing:closed_on_one_rank")
def test_ranks_agree_on_requests_when_only_one_has_closed_its_queue(found: list[int]) -> None:
    """Indices start again where the queue was closed; ranks do not compare them."""
    assert found == [1, 0]


def test_nothing_is_written_once_an_abort_has_returned(tmp_path: Path) -> None:
    """No writer has a file of the checkpoint open, none is left, and no Python worker runs."""
    state = {str(number): torch.full((1 << 18,), float(number)) for number in range(64)}
    fifo = tmp_path / "fifo"
    queue = AsyncCallsQueue()
    schedule(queue, tmp_path / "checkpoint", state, thread_count=4)
    os.mkfifo(fifo)
    noting = AsyncRequest(calls.wait_then_note_pid, [str(fifo), str(tmp_path / "pid")], [])
    queue.schedule_async_request(noting)
    abort_nvrx_checkpoint()
    open_files = [file.path for pid in writer_pids() for file in psutil.Process(pid).open_files()]
    assert [path for path in open_files if str(tmp_path) in path] == []
    assert os.listdir(tmp_path / "checkpoint") == []
    assert not [pid for pid in descendants() if "python_worker" in command_of(pid)]
    assert not (tmp_path / "pid").exists()


def test_a_monitor_thread_can_abort_while_the_main_thread_waits(tmp_path: Path) -> None:
    """An abort by an in-process restart ends the wait with a typed error, and saving goes on."""
    queue, waits_in = AsyncCallsQueue(), AsyncCallsQueue.maybe_finalize_async_calls

    def monitor() -> None:
        wait_until(lambda: stands_in(threading.main_thread(), waits_in))
        abort_nvrx_checkpoint()

    with Hold("report") as hold, ThreadPoolExecutor(1) as pool:
        hold.stop(schedule, queue, tmp_path / "aborted", small_state(1))
        aborting = pool.submit(monitor)
        with pytest.raises(SaveAbortedError):
            queue.maybe_finalize_async_calls(blocking=True)
        aborting.result()
    schedule(queue, tmp_path / "after", small_state(2))
    assert len(queue.maybe_finalize_async_calls(blocking=True)) == 1
    queue.close()
    assert os.listdir(tmp_path / "aborted") == []
    assert loaded_wrong(tmp_path / "after", small_state(2), small_state(0)) == []
