"""Ranks that schedule requests through queues."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from nostall import is_complete
from nostall._queue import ending
from nostall.core import AsyncCallsQueue, AsyncRequest, abort_nvrx_checkpoint
from nostall.errors import SaveTimeoutError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
from nostall.torch_ckpt import TorchAsyncCheckpoint
from programs import calls
from programs.entry_points import State, loaded_wrong
from support.faults import Fault, Hold, inject, writer_pids
from support.states import schedule

Facts = dict[str, Any]


def _state(seed: int) -> State:
    rank = dist.get_rank()
    return {"shared": torch.full((6,), float(seed)), f"own {rank}": torch.full((rank + 1,), seed)}


def _wrong(path: Path, seed: int) -> list[str]:
    return loaded_wrong(path, _state(seed), _state(0))


def _nothing(*finalize: Callable[[], Any]) -> AsyncRequest:
    return AsyncRequest(None, [], list(finalize))


def _failure(do: Callable[[], Any]) -> Facts:
    try:
        do()
    except CheckpointException as error:
        return {"ranks": sorted(error.failures), "text": str(error)}
    return {"ranks": [], "text": "it did not fail"}


def _names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir()) if path.exists() else []


def in_order(out: Path) -> Facts:
    """Requests of all kinds through one queue; the order in which they are finalised."""
    finalized: list[Any] = []
    order: list[str] = []
    rank = dist.get_rank()
    with AsyncCallsQueue() as queue:
        scheduled = [schedule(queue, out / "first", _state(1))]
        archive = torch.save if rank == 1 else None
        arguments = [torch.arange(3), str(out / "second.pt")] if rank == 1 else []
        request = AsyncRequest(archive, arguments, [lambda: order.append("second")])
        scheduled.append(queue.schedule_async_request(request))
        scheduled.append(queue.schedule_async_request(_nothing(lambda: order.append("third"))))
        empty = {} if rank == 1 else {"only": torch.ones(4)}
        scheduled.append(schedule(queue, out / "fourth", empty))
        scheduled.append(schedule(queue, out / "fifth", _state(5)))
        pending = [queue.pending]
        while queue.pending:
            finalized += queue.poll()
        pending.append(queue.get_num_unfinalized_calls())
        scheduled.append(schedule(queue, out / "sixth", _state(6)))
        finalized += queue.wait()
        worker = _worker_failures(queue)
        after = schedule(queue, out / "after", _state(7))
        finalized_after = queue.wait()
    expected = {"only": torch.ones(4)} if rank == 0 else {}
    dist.barrier()
    return {
        "scheduled": scheduled,
        "finalized": finalized,
        "order": order,
        "pending": pending,
        "archive": torch.load(out / "second.pt").tolist(),
        "files of fourth": _names(out / "fourth"),
        "worker": {**worker, "after": finalized_after == [after]},
        "wrong": [
            *_wrong(out / "first", 1),
            *loaded_wrong(out / "fourth", expected, {k: v.clone() for k, v in expected.items()}),
            *_wrong(out / "fifth", 5),
            *_wrong(out / "sixth", 6),
            *_wrong(out / "after", 7),
        ],
    }


def _worker_failures(queue: AsyncCallsQueue) -> Facts:
    """A rank's Python worker raises, then dies."""
    facts: Facts = {}
    for name, call, argument in (("raises", calls.explode, "no luck"), ("dies", calls.leave, 17)):
        mine = dist.get_rank() == 1
        queue.schedule_async_request(
            AsyncRequest(call if mine else None, [argument] if mine else [], [])
        )
        facts[name] = _failure(queue.wait)
    return facts


def two_queues(out: Path) -> Facts:
    """Two queues on the same ranks, finalised in the other order than they were scheduled."""
    with AsyncCallsQueue() as model, AsyncCallsQueue(persistent=False) as ema:
        scheduled = [
            schedule(model, out / "model 0", _state(1)),
            schedule(ema, out / "ema 0", _state(2)),
            schedule(model, out / "model 1", _state(3)),
        ]
        finalized = [ema.wait(), model.wait()]
    return {
        "scheduled": scheduled,
        "finalized": finalized,
        "wrong": [
            *_wrong(out / "model 0", 1),
            *_wrong(out / "ema 0", 2),
            *_wrong(out / "model 1", 3),
        ],
    }


def failures(out: Path) -> Facts:
    """One rank's storage is full, or its snapshot fails; a save before and one after go well."""
    return {
        f"{where} of rank {rank}": _fail_between(out / where / str(rank), where, rank)
        for where, rank in (("storage", 1), ("storage", 0), ("snapshot", 1), ("finalizer", 1))
    }


def _fail_between(out: Path, where: str, rank: int) -> Facts:
    mine = dist.get_rank() == rank
    finalized: list[str] = []
    with AsyncCallsQueue() as queue:
        schedule(queue, out / "before", _state(1))
        if where == "storage":
            with inject(*[Fault.errno("chunk", errno.ENOSPC)] if mine else []):
                schedule(queue, out / "failed", _state(2))
        elif where == "snapshot":
            writer = FileSystemWriterAsync(out / "failed")
            planned = save_state_dict_async_plan(_state(2), writer)
            save_fn, preload_fn, args = writer.get_save_function_and_args()
            preload_fn = partial(_fail_on, rank, preload_fn)
            finalize: list[Callable[[], Any]] = [partial(save_state_dict_async_finalize, *planned)]
            queue.schedule_async_request(
                AsyncRequest(save_fn, args, finalize, preload_fn=preload_fn)
            )
        else:
            queue.schedule_async_request(
                _nothing(partial(_fail_on, rank), lambda: finalized.append("failed"))
            )
        schedule(queue, out / "after", _state(3))
        try:
            failed = _failure(queue.wait)
        except ValueError as error:
            failed = {"ranks": [], "text": str(error)}
        pending = queue.pending
        after = queue.wait()
    dist.barrier()
    return {
        **failed,
        "pending": pending,
        "after": after,
        "finalized": finalized,
        "left": _names(out / "failed"),
        "wrong": _wrong(out / "before", 1) + _wrong(out / "after", 3),
    }


def _fail_on(rank: int, otherwise: Callable[[], Any] = lambda: None) -> Any:
    if dist.get_rank() == rank:
        raise ValueError("no luck")
    return otherwise()


def not_in_time(out: Path) -> Facts:
    """One rank's writer is busy for longer than any wait lasts."""
    held = dist.get_rank() == 1
    with AsyncCallsQueue() as queue, Hold() as hold:
        with inject(*[hold.fault] if held else []):
            schedule(queue, out, _state(1))
        try:
            queue.wait(timeout=0.2)
            text = "it was in time"
        except SaveTimeoutError as error:
            text = str(error)
        early = queue.poll()
        if held:
            hold.release()
        return {"text": text, "early": early, "finalized": queue.wait(60), "wrong": _wrong(out, 1)}


def different_numbers(out: Path) -> Facts:
    """Rank 0 has scheduled one request more; then all is aborted, and ranks go on together."""
    with AsyncCallsQueue() as queue:
        for _ in range(2 if dist.get_rank() == 0 else 1):
            queue.schedule_async_request(_nothing())
        try:
            queue.wait()
            text = "it went well"
        except RuntimeError as error:
            text = str(error)
        queue.close(abort=True)
        index = schedule(queue, out, _state(1))
        return {"text": text, "again": queue.wait() == [index], "wrong": _wrong(out, 1)}


def only_one_rank(out: Path) -> Facts:
    """Rank 1 alone saves with ``torch.save``, and no other rank is asked."""
    if dist.get_rank() == 0:
        return {}
    checkpoint = TorchAsyncCheckpoint()
    out.mkdir(parents=True)
    checkpoint.async_save({"a": torch.ones(2)}, out / "one.pt")
    checkpoint.finalize_async_save(blocking=True)
    checkpoint.close()
    return {"loaded": torch.load(out / "one.pt")["a"].tolist()}


def errors_in_the_block(out: Path) -> Facts:
    """Both ranks leave with an exception, then only rank 1, with rank 0 in a collective."""
    facts: Facts = {}
    for how in ("together", "alone"):
        leaves = how == "together" or dist.get_rank() == 1
        queue = AsyncCallsQueue()
        raised = KeyError("mine")
        ending.LEAVING_S = 60.0 if how == "together" else 0.2
        try:
            with queue if leaves else nullcontext():
                schedule(queue, out / how, _state(1))
                if leaves:
                    raise raised
        except KeyError:
            pass
        dist.barrier()  # where rank 0 waits meanwhile
        queue.close(abort=True)
        facts[how] = {
            "raised": raised.args[0],
            "is complete": is_complete(out / how),
            "note": "".join(getattr(raised, "__notes__", [])),
        }
    facts["together"]["wrong"] = _wrong(out / "together", 1)
    del facts["together"]["note"]
    return facts


def aborted_while_stuck(out: Path) -> Facts:
    """The writer hangs on every rank; everything is aborted, and saved again elsewhere."""
    finalized: list[str] = []
    with AsyncCallsQueue() as queue, AsyncCallsQueue() as other, Hold("report") as hold:
        with inject(hold.fault):
            schedule(queue, out / "stuck", _state(1))
        schedule(other, out / "behind", _state(2))
        other.schedule_async_request(_nothing(lambda: finalized.append("behind")))
        hold.wait_reached()
        (stuck,) = writer_pids()
        abort_nvrx_checkpoint()
        pending = [queue.pending, other.pending]
        late = queue.poll() + other.poll()
        indices = [
            schedule(queue, out / "again", _state(3)),
            schedule(other, out / "too", _state(4)),
        ]
        again = [queue.wait(), other.wait()]
    dist.barrier()
    return {
        "pending": pending,
        "late": late,
        "finalized": finalized,
        "killed": not Path(f"/proc/{stuck}").exists(),
        "again": [[index] for index in indices] == again,
        "left": _names(out / "stuck") + _names(out / "behind"),
        "wrong": _wrong(out / "again", 3) + _wrong(out / "too", 4),
    }


def two_ranks(out: Path) -> dict[str, Facts]:
    """All scenarios for two ranks."""
    return {
        scenario.__name__: scenario(out / scenario.__name__)
        for scenario in (
            in_order,
            two_queues,
            failures,
            not_in_time,
            different_numbers,
            only_one_rank,
            errors_in_the_block,
            aborted_while_stuck,
        )
    }
