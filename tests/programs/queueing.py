"""Ranks that schedule requests through queues; a fact that is not as it should be fails them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from nostall import configure, is_complete
from nostall._queue import ending
from nostall._ranks import agreement
from nostall.core import AsyncCallsQueue, AsyncRequest, abort_nvrx_checkpoint
from nostall.errors import SaveTimeoutError, StagingError
from nostall.options import EngineOptions
from nostall.torch_ckpt import TorchAsyncCheckpoint
from programs import calls
from programs.entry_points import State, loaded_wrong
from support.faults import Hold, inject, writer_pids
from support.states import names, planned, schedule


def _state(seed: int) -> State:
    rank = dist.get_rank()
    return {"shared": torch.full((6,), float(seed)), f"own {rank}": torch.full((rank + 1,), seed)}


def _require_saved(path: Path, seed: int) -> None:
    assert loaded_wrong(path, _state(seed), _state(0)) == []


def nothing(*finalize: Callable[[], Any]) -> AsyncRequest:
    """A request with nothing to do in the background."""
    return AsyncRequest(None, [], list(finalize))


def in_order(out: Path) -> None:
    """Requests of all kinds through one queue; the order in which they are finalised."""
    finalized: list[Any] = []
    order: list[str] = []
    mine = dist.get_rank() == 1
    archive = [torch.arange(3), str(out / "second.pt")] if mine else []
    save = torch.save if mine else None
    only = {} if mine else {"only": torch.ones(4)}
    with AsyncCallsQueue() as queue:
        schedule(queue, out / "first", _state(1))
        queue.schedule_async_request(AsyncRequest(save, archive, [lambda: order.append("second")]))
        queue.schedule_async_request(nothing(lambda: order.append("third")))
        schedule(queue, out / "fourth", only)
        assert schedule(queue, out / "fifth", _state(5)) == 4
        assert queue.pending == 5
        while queue.pending:
            finalized += queue.poll()
        assert schedule(queue, out / "sixth", _state(6)) == 5
        finalized += queue.wait()
        assert queue.get_num_unfinalized_calls() == 0
    assert finalized == [0, 1, 2, 3, 4, 5]
    assert order == ["second", "third"]
    dist.barrier()
    assert torch.load(out / "second.pt").tolist() == [0, 1, 2]
    assert names(out / "fourth") == [".metadata", "__0_0.distcp"]
    assert loaded_wrong(out / "fourth", only, {name: torch.zeros(4) for name in only}) == []
    for seed, name in ((1, "first"), (5, "fifth"), (6, "sixth")):
        _require_saved(out / name, seed)


def two_queues(out: Path) -> None:
    """Two queues on the same ranks, finalised in the other order than they were scheduled."""
    with AsyncCallsQueue() as model, AsyncCallsQueue(persistent=False) as ema:
        assert schedule(model, out / "model 0", _state(1)) == 0
        assert schedule(ema, out / "ema 0", _state(2)) == 0
        assert schedule(model, out / "model 1", _state(3)) == 1
        assert ema.wait() == [0]
        assert model.wait() == [0, 1]
    for seed, name in enumerate(("model 0", "ema 0", "model 1"), 1):
        _require_saved(out / name, seed)


def fails(out: Path, where: str) -> dict[str, Any]:
    """A request of rank 1 fails; a save before and one after go well."""
    mine = dist.get_rank() == 1
    finalized: list[str] = []
    match where:
        case "snapshot":
            _, request = planned(out / "failed", _state(2))
            assert request.preload_fn is not None
            failing = partial(_fail_on_rank_1, request.preload_fn)
            request = request._replace(preload_fn=failing)
        case "finalizer":
            request = nothing(_fail_on_rank_1, lambda: finalized.append("failed"))
        case "worker-raises":
            request = AsyncRequest(calls.explode, ["no luck"], []) if mine else nothing()
        case _:
            request = AsyncRequest(calls.leave, [17], []) if mine else nothing()
    said: dict[str, Any] = {"where": where}
    with AsyncCallsQueue() as queue:
        schedule(queue, out / "before", _state(1))
        queue.schedule_async_request(request)
        schedule(queue, out / "after", _state(3))
        try:
            queue.wait()
        except CheckpointException as error:
            said |= {"ranks": sorted(error.failures), "text": str(error)}
        except ValueError as error:
            said |= {"text": str(error)}
        assert queue.pending == 1
        assert queue.wait() == [2]
    dist.barrier()
    assert names(out / "failed") == []
    _require_saved(out / "before", 1)
    _require_saved(out / "after", 3)
    return {**said, "finalized": finalized}


def _fail_on_rank_1(otherwise: Callable[[], Any] = lambda: None) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    return otherwise()


def not_in_time(out: Path) -> str:
    """One rank's writer is busy for longer than any wait lasts."""
    held, said = dist.get_rank() == 1, ""
    with AsyncCallsQueue() as queue, Hold() as hold:
        with inject(*[hold.fault] if held else []):
            schedule(queue, out, _state(1))
        if not held:
            wait([call.outcome for call in queue._caller._calls])
        dist.barrier()
        try:
            queue.wait(timeout=0.2)
        except SaveTimeoutError as error:
            said = str(error)
        assert queue.poll() == []
        if held:
            hold.release()
        assert queue.wait(60) == [0]
    _require_saved(out, 1)
    return said


def different_numbers(out: Path) -> str:
    """Rank 0 has scheduled one request more; then all is aborted, and ranks go on together."""
    said = ""
    with AsyncCallsQueue() as queue:
        for _ in range(2 if dist.get_rank() == 0 else 1):
            queue.schedule_async_request(nothing())
        try:
            queue.wait()
        except RuntimeError as error:
            said = str(error)
        queue.close(abort=True)
        index = schedule(queue, out, _state(1))
        assert queue.wait() == [index]
    _require_saved(out, 1)
    return said


def closed_on_one_rank(out: Path) -> int:
    """Rank 1 closes its queue between two requests; the index of the second one."""
    del out
    queue = AsyncCallsQueue()
    queue.schedule_async_request(nothing())
    queue.wait()
    if dist.get_rank() == 1:
        queue.close()
    index = queue.schedule_async_request(nothing())
    assert queue.wait() == [index]
    queue.close()
    return index


def a_rank_that_does_not_poll_is_named_instead_of_waited_for(out: Path) -> str:
    """Rank 1 does not take part in a poll, having scheduled nothing but what was refused."""
    del out
    configure(EngineOptions(save_timeout_s=2.0))
    store = dist.distributed_c10d._get_default_store()
    said, queue = "", AsyncCallsQueue()
    if dist.get_rank() == 0:
        queue.schedule_async_request(nothing())
    else:
        with suppress(StagingError):  # rank 0 says whether it counts
            queue.schedule_async_request(AsyncRequest(print, (threading.Lock(),), []))
    dist.barrier()
    if dist.get_rank() == 0:
        with patch.object(agreement, "PATIENCE_S", 0.0):
            try:
                queue.wait()
            except SaveTimeoutError as error:
                said = str(error)
        store.set("rank 0 is done", "")
    else:
        store.wait(["rank 0 is done"])
    queue.close(abort=True)
    return said


def only_one_rank(out: Path) -> None:
    """Rank 1 alone saves with ``torch.save``, and no other rank is asked."""
    if dist.get_rank() == 1:
        checkpoint = TorchAsyncCheckpoint()
        checkpoint.async_save({"a": torch.ones(2)}, out / "one.pt")
        checkpoint.finalize_async_save(blocking=True)
        checkpoint.close()
        assert torch.load(out / "one.pt")["a"].tolist() == [1, 1]


def errors_in_the_block(out: Path) -> list[list[str]]:
    """Both ranks leave with an exception, then only rank 1, with rank 0 in a collective.

    Rank 1 has scheduled a request alone before, so the ranks count differently.
    """
    notes: list[list[str]] = []
    only_one_rank(out)
    for how in ("together", "alone"):
        leaves = how == "together" or dist.get_rank() == 1
        queue, raised = AsyncCallsQueue(), KeyError("mine")
        handled: list[KeyError] = []
        ending.LEAVING_S = 60.0 if how == "together" else 0.2
        with Hold() as hold:
            try:
                with queue if leaves else nullcontext():
                    with inject(*[] if leaves else [hold.fault]):  # else it is committed by then
                        schedule(queue, out / how, _state(1))
                    if leaves:
                        raise raised
            except KeyError as error:
                handled.append(error)
            dist.barrier()  # where rank 0 waits meanwhile
        queue.close(abort=True)
        assert handled == [raised][:leaves]
        assert is_complete(out / how) is (how == "together")
        notes.append(getattr(raised, "__notes__", []))
    _require_saved(out / "together", 1)
    return notes


def aborted_while_stuck(out: Path) -> None:
    """The writer hangs on every rank; everything is aborted, and saved again elsewhere."""
    finalized: list[str] = []
    other = AsyncCallsQueue(persistent=False)
    with AsyncCallsQueue() as queue, other, Hold("report") as hold:
        with inject(hold.fault):
            schedule(queue, out / "stuck", _state(1))
        schedule(other, out / "behind", _state(2))
        other.schedule_async_request(nothing(lambda: finalized.append("behind")))
        hold.wait_reached()
        (stuck,) = writer_pids()
        abort_nvrx_checkpoint()
        assert queue.pending == other.pending == 0
        assert queue.poll() == other.poll() == []
        again = schedule(queue, out / "again", _state(3)), schedule(other, out / "too", _state(4))
        assert ([again[0]], [again[1]]) == (queue.wait(), other.wait())
    dist.barrier()
    assert finalized == []
    assert not Path(f"/proc/{stuck}").exists()
    assert names(out / "stuck") == names(out / "behind") == []
    _require_saved(out / "again", 3)
    _require_saved(out / "too", 4)
