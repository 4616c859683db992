"""Saves that are committed before anybody polls, on two ranks and four."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import nostall
from nostall import _torch
from nostall._engine import Engine
from nostall._model.threads import is_done
from nostall._queue.callers import Call
from nostall._queue.ending import await_answers, fail_late, scheduled
from nostall._ranks.group import Records
from nostall._save.early_commit import EarlyCommit
from nostall._save.split_save import SplitSave
from nostall.core import AsyncCallsQueue
from nostall.errors import RankLostError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrations._saves import Saves
from nostall.removal import remove_checkpoint
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_plan,
    vouch_for,
)
from programs.planning import collectives, failure
from support.faults import Fault, Hold, inject
from support.states import planned
from support.waiting import wait_until

WARM = 3
"""After so many saves the coordinator has all results, and nothing is planned."""


_real_store = _torch.default_store


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Job:
    """Saves of one structure to numbered directories; the values are the numbers."""

    def __init__(
        self,
        out: Path,
        group: dist.ProcessGroup | None = None,
        planner: Callable[[], DefaultSavePlanner] = DefaultSavePlanner,
    ) -> None:
        self.out = out
        self.planner = planner
        self.group = group
        self.queue = AsyncCallsQueue()
        self.cache = CheckpointMetadataCache()
        self.next = 0
        for _ in range(WARM):
            self.save_now()

    def state(self, value: float) -> dict[str, torch.Tensor]:
        return {f"rank{_rank()}": torch.full((1000,), float(value))}

    def save(
        self,
        *before: Callable[[], None],
        after: Sequence[Callable[[], None]] = (),
        to: str = "",
        queue: AsyncCallsQueue | None = None,
    ) -> Any:
        """Begin the next save, a ``SplitSave``; functions run before and after its commit."""
        path, state = self.out / (to or f"{self.next}"), self.state(self.next)
        how: dict[str, Any] = {"planner": self.planner(), "cache": self.cache, "group": self.group}
        _, request = planned(path, state, before=before, after=after, **how)
        self.next += 1
        (queue or self.queue).schedule_async_request(request)
        return request.async_fn

    def plan(self, to: str) -> None:
        """Plan the next save; when it is dropped, its tensors go without the garbage collector."""
        state, writer = self.state(self.next), FileSystemWriterAsync(self.out / to)
        tensor = weakref.ref(state[f"rank{_rank()}"])
        save_state_dict_async_plan(state, writer, self.group, 0, self.planner(), True, self.cache)
        self.next += 1
        del state, writer
        assert tensor() is None

    @contextmanager
    def held(
        self, point: str, *, here: bool = True, to: str = ""
    ) -> Iterator[tuple[EarlyCommit, Callable[[], None]]]:
        """The next save, which stops at a point of this rank, if ``here``, until it is released."""
        with Hold(point) as hold:
            with inject(hold.fault) if here else nullcontext():
                self.save(to=to)
                if here:
                    hold.wait_reached()
            early = self.queue._caller._calls[-1].early
            assert early is not None
            yield early, hold.release if here else lambda: None

    def poll(self) -> int:
        """Until all is finalised; the number of polls."""
        polls = 0
        while self.queue.pending:
            polls += 1
            if not self.queue.poll():
                time.sleep(0.001)  # training's: without it, polls would keep a core from the writer
        return polls

    def save_now(self, **options: Any) -> None:
        """The next save, waited for."""
        self.save(**options)
        self.queue.wait()

    def is_whole(self, number: int) -> bool:
        """Whether a save is there, with every byte."""
        path = self.out / f"{number}"
        return nostall.is_complete(path) and nostall.verify(path).ok

    def are_whole(self) -> list[bool]:
        return [self.is_whole(each) for each in range(self.next)]

    def values(self, name: str) -> list[float]:
        """The value that each rank saved in a directory."""
        state = {f"rank{rank}": torch.zeros(1000) for rank in range(2)}
        nostall.load(state, self.out / name)
        assert all(bool((each == each[0]).all()) for each in state.values())
        return [float(each[0]) for each in state.values()]

    def files(self, number: int) -> list[str]:
        return sorted(os.listdir(self.out / f"{number}"))


@contextmanager
def store_operations() -> Iterator[Counter[str]]:
    """Calls of the group's store in the block but for looks, by name, once it has ended."""
    real, store = _real_store(), _torch.default_store()
    counting = store if isinstance(store, Mock) else Mock(wraps=store)

    def of_this_group() -> Any:
        return counting if _real_store() is real else _real_store()

    # Also after the block: records belong to the store in which they were made.
    _torch.default_store = of_this_group
    counting.reset_mock()
    seen: Counter[str] = Counter()
    yield seen
    seen.update(name for name, *_ in counting.method_calls if name != "check")


_met: weakref.WeakKeyDictionary[dist.Store, Counter[str]] = weakref.WeakKeyDictionary()


def barrier(name: str) -> None:
    """All ranks meet, without a collective."""
    store = dist.distributed_c10d._get_default_store()
    met = _met.setdefault(store, Counter())
    met[name] += dist.get_world_size()
    store.add(name, 1)
    wait_until(lambda: store.add(name, 0) >= met[name])


def early_of(save: SplitSave) -> EarlyCommit:
    """The early commit of a save that is not over."""
    assert save.early is not None
    return save.early


class OwnPlanner(DefaultSavePlanner):
    """A class of which nothing is known."""


def own_planner(out: Path) -> dict[str, Any]:
    """With a planner of one's own that does not flatten the state, as Megatron's."""
    return steady(out, planner=partial(OwnPlanner, flatten_state_dict=False))


class VouchedPlanner(DefaultSavePlanner):
    """A class that somebody vouches for, and what it was asked."""

    asked: ClassVar[Counter[str]] = Counter()

    def set_up_planner(self, *arguments: Any, **named: Any) -> None:
        self.asked["set up"] += 1
        super().set_up_planner(*arguments, **named)


def vouched_planner(out: Path) -> dict[str, Any]:
    """With such a planner: it is asked nothing from the fourth save of a structure on."""
    vouch_for(VouchedPlanner)
    found = steady(out, planner=partial(VouchedPlanner, flatten_state_dict=False))
    assert VouchedPlanner.asked["set up"] == WARM, VouchedPlanner.asked
    job = Job(out / "again", planner=partial(VouchedPlanner, flatten_state_dict=False))
    job.planner = VouchedPlanner  # another configuration: planned, alone and then together
    job.save_now()
    assert VouchedPlanner.asked["set up"] == 2 * WARM + 1, VouchedPlanner.asked
    assert job.is_whole(WARM)
    return found


def steady(out: Path, **how: Any) -> dict[str, Any]:
    """Committed though nobody polls; then what is left for the training thread."""
    job = Job(out, **how)
    with store_operations() as stored, collectives() as seen:
        early = early_of(job.save())
        wait_until(lambda: nostall.is_complete(out / f"{WARM}"))
        wait_until(partial(_is_committed, early))
        barrier("committed")
        committed_with = dict(seen)
        polls = job.poll()
    at_once = dict(stored)
    with store_operations() as later:
        for _ in range(3):
            job.save()
            job.poll()
    return {
        "collectives before": committed_with,
        "polls": polls,
        "collectives": dict(seen),
        "store": at_once,
        "removed later": later["delete_key"],
        "whole": job.are_whole(),
    }


def planned_first(out: Path) -> dict[str, Any]:
    """The saves before the steady state, and those after a change on one rank."""
    job = Job(out)
    changed = patch.object(Job, "state", _wider) if dist.get_rank() == 1 else nullcontext()
    with store_operations() as stored, collectives() as seen, changed:
        job.save_now()
    said = {"collectives": dict(seen), "store": dict(stored)}
    job.save_now()
    return {"changed": said, "whole": job.are_whole()}


def _wider(_job: Job, value: float) -> dict[str, torch.Tensor]:
    return {f"rank{_rank()}": torch.full((2000,), float(value))}


class Empty(Job):
    """Rank 0, the coordinator, has nothing to write."""

    def state(self, value: float) -> dict[str, torch.Tensor]:
        return {} if _rank() == 0 else super().state(value)


def given_up_before(out: Path, who: str) -> dict[str, Any]:
    """A rank gives the save up when its files are written, and before those of the other are.

    It is rank 1 (``other``), or the coordinator, which has nothing to write (``empty``).
    """
    job, gives_up = (Job(out), 1) if who == "other" else (Empty(out), 0)
    job.save()
    wait_until(lambda: nostall.is_complete(out / f"{WARM}"))
    barrier("committed")
    job.poll()
    is_giving_up = dist.get_rank() == gives_up
    with job.held("chunk", here=not is_giving_up) as (early, release):
        if is_giving_up:
            wait_until(lambda: early._is_offered)
            job.queue.close(abort=True)
        barrier("given up")
        release()
        wait_until(lambda: early._over is not None and early._over.done())
        barrier("over")
        is_there = nostall.is_complete(out / f"{WARM + 1}")
        job.queue.close(abort=True)
    barrier("both")
    files = job.files(WARM + 1)
    job.save()
    job.poll()
    return {"complete": is_there, "files": files, "whole": job.is_whole(WARM + 2)}


def given_up_too_late(out: Path, who: str) -> dict[str, Any]:
    """Rank 1, or all ranks, give the save up while rank 0 commits it, which storage holds up."""
    job, is_first = Job(out), dist.get_rank() == 0
    soon = patch("nostall._save.early_commit.CANCEL_TIMEOUT_S", 0.2)
    with job.held("publish", here=is_first) as (early, release), soon:
        barrier("committing")
        if who == "all" or not is_first:
            job.queue.close(abort=True)
        barrier("given up")
        release()
        wait_until(lambda: not is_first or not early.is_committing)
    barrier("over")
    job.queue.close(abort=True)
    return {"whole": job.is_whole(WARM), "files": len(job.files(WARM))}


def with_a_function_before(out: Path) -> dict[str, Any]:
    """Something of the user's is part of the checkpoint."""
    job = Job(out)
    said: list[bool] = []
    path = out / f"{job.next}"
    job.save(lambda: said.append(nostall.is_complete(path)))
    wait_until(lambda: not job.queue._caller._calls or is_done(job.queue._caller._calls[0].outcome))
    job.poll()
    return {"complete before": said, "whole": job.is_whole(WARM)}


def failed(out: Path, point: str, how: str) -> dict[str, Any]:
    """The disk is full when rank 1 writes (``chunk``) or the coordinator commits (``publish``)."""
    job = Job(out)
    is_failing = dist.get_rank() == (point == "chunk")
    with inject(Fault.errno(point, errno.ENOSPC)) if is_failing else nullcontext():
        early = early_of(job.save())
        wait_until(lambda: point == "chunk" or not is_failing or early._ending is not None)
        error = failure(job.poll if how == "polling" else job.queue.wait)["text"]
    barrier("over")
    files = job.files(WARM)
    job.save_now()
    with collectives() as seen:
        job.save()
    job.queue.wait()
    said = dict(seen) if point == "chunk" else {}  # what is refused is planned by all ranks again
    return {"error": error, "files": files, "planned with": said, "whole": job.are_whole()}


def given_up_alone(out: Path, how: str) -> dict[str, Any]:
    """Rank 1 gives a save up, or does not schedule it, and saves to the same directory again."""
    job = Job(out)
    if dist.get_rank() == 1:
        other = AsyncCallsQueue()  # a queue notices it itself
        planning = patch("nostall._save.split_plan.planner_key", side_effect=KeyboardInterrupt)
        with planning if how == "interrupted" else nullcontext(), suppress(KeyboardInterrupt):
            job.save(to="same", queue=other) if how == "scheduled" else job.plan("same")
        other.close(abort=True)
    job.save(to="same")
    job.next = WARM + 2
    error = failure(job.queue.wait)["text"]
    barrier("over")
    is_there = nostall.is_complete(out / "same")
    job.save_now(to="same")
    return {"error": error, "is there": is_there, "values": job.values("same")}


def given_up_by_all(out: Path) -> dict[str, Any]:
    """Each rank, at its own time; then they save to the same directory again."""
    job = Job(out)
    for _ in range(2):
        job.save(to="same")
        if dist.get_rank() == 1:
            job.queue.close(abort=True)
    job.queue.close(abort=True)
    job.save(to="same")
    job.poll()
    return {"whole": job.values("same") == [WARM + 2] * 2}


def one_rank_is_slow(out: Path) -> dict[str, Any]:
    """The others poll while the last rank writes; then the save is committed, as any other."""
    job = Job(out)
    is_slow = dist.get_rank() == dist.get_world_size() - 1
    with (
        store_operations() as stored,
        collectives() as seen,
        job.held("chunk", here=is_slow) as (_, release),
    ):
        finalised = [job.queue.poll() for _ in range(5)]
        is_early = nostall.is_complete(out / f"{WARM}")
        barrier("polled")
        release()
        wait_until(lambda: nostall.is_complete(out / f"{WARM}"))
        polls = job.poll()
    return {
        "finalised": finalised,
        "early": is_early,
        "collectives": dict(seen),
        "polls": 5 + polls,
        "store": dict(stored),
        "whole": job.is_whole(WARM),
    }


def one_rank_is_dead(out: Path) -> dict[str, Any]:
    """The last rank ends, with its writer, before it has written; the others poll."""
    job, error = Job(out), ""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with (
        store_operations() as stored,
        collectives() as seen,
        job.held("chunk", here=is_last),
    ):
        if is_last:
            for child in psutil.Process().children():
                child.kill()
            os._exit(0)  # with another status torchrun would end the others
        try:
            job.poll()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    job.queue.close(abort=True)  # a rank that ends with a lost save has status 1: the others end
    return {
        "error": error,
        "collectives": dict(seen),
        "store": dict(stored),
        "whole": job.are_whole(),
    }


def without_a_store(out: Path) -> dict[str, Any]:
    """Rank 1 cannot reach it."""
    job = Job(out)
    gone = patch.object(Records, "put", side_effect=RuntimeError("Broken pipe"))
    with gone if dist.get_rank() == 1 else nullcontext():
        job.save()
        job.poll()
        job.save_now()
    return {"whole": all(job.are_whole())}


def killed_between(out: Path, place: str, point: str, *victims: str) -> None:
    """Trainer, writer or both of rank 0 are killed between durable files and publication."""
    job = Job(out)
    job.save(to="over")
    job.poll()
    if dist.get_rank():
        job.save(to=place)
        barrier("killed")
        return
    with job.held(point, to=place) as (_, release):
        if "writer" in victims:
            for process in psutil.Process().children():
                process.kill()
        if "trainer" in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        release()
        wait_until(lambda: nostall.is_complete(out / place))
    barrier("killed")


def starts_again(out: Path, *places: str) -> list[list[float]]:
    """One save to each place, by a job of its own; what is there then."""
    found = []
    for number, place in enumerate(places):
        job = Job(out / f"{number}")
        job.save(to=f"../{place}")
        job.poll()
        found.append(job.values(f"../{place}"))
        barrier(f"loaded {number}")
    return found


def with_functions_on_one_rank(out: Path) -> dict[str, Any]:
    """Only rank 0 has a finalize function, such as one that records the newest checkpoint."""
    job, ran = Job(out), []
    for _ in range(2):
        job.save(after=[lambda: ran.append(1)] if dist.get_rank() == 0 else [])
        job.poll()
    return {"ran": len(ran), "whole": job.is_whole(WARM + 1)}


def in_groups_of_one(out: Path) -> dict[str, Any]:
    """One queue for ranks that save alone; only rank 0 could commit early; then rank 1 fails."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    job = Job(out / f"of {dist.get_rank()}", groups[dist.get_rank()])
    is_other = dist.get_rank() == 1
    with patch.object(Job, "state", _wider) if is_other else nullcontext():
        job.save()
        job.poll()
    with inject(Fault.errno("chunk", errno.ENOSPC)) if is_other else nullcontext():
        job.save()
        is_raised = failure(job.poll)["ranks"] != []
    is_there = nostall.is_complete(job.out / f"{WARM + 1}")
    return {"whole": job.is_whole(WARM), "raised": is_raised, "complete": is_there}


def given_up_in_another_queue(out: Path) -> dict[str, Any]:
    """Rank 1 gives up what rank 0 has finalised, when rank 0 has begun another save.

    Two queues share the cache; rank 1 polls each of them once.
    """
    job, other = Job(out), AsyncCallsQueue()
    first = early_of(job.save())
    second = early_of(job.save(queue=other))
    wait_until(lambda: dist.get_rank() != 0 or bool(first.committed and second.committed))
    barrier("committed")
    job.queue.poll()
    other.poll()
    barrier("asked")
    if dist.get_rank() == 0:
        job.poll()
        while other.pending:
            other.poll()
        third = early_of(job.save())
        wait_until(lambda: third._is_offered and not third._retired)
        barrier("removed")
        barrier("given up")
    else:
        barrier("removed")
        job.queue.close(abort=True)
        barrier("given up")
    found = {"whole": job.is_whole(WARM)}
    barrier("seen")
    job.queue.close(abort=True)
    other.close(abort=True)
    return found


def two_to_one_directory(out: Path) -> list[list[float]]:
    """The later save wins, though rank 1 has written both before anybody polls."""
    job, found = Job(out), []
    for number in range(6):
        with job.held("chunk", here=_rank() == 1, to=f"twice {number}") as (_, release):
            last = job.save(to=f"twice {number}")
            release()
            wait_until(last._report.done)
            barrier(f"written {number}")
            job.poll()
        barrier(f"done {number}")
        found.append([each - job.next + 1 for each in job.values(f"twice {number}")])
        barrier(f"loaded {number}")
    return found


def counted_differently_in_flight(out: Path) -> dict[str, Any]:
    """Rank 1 has planned a save that nobody else knows of, and two are in flight."""
    job = Job(out)
    if dist.get_rank() == 1:
        job.plan("elsewhere")
        job.next -= 1
    saves = [job.save(), job.save()]
    for save in saves:
        wait_until(save._report.done)
    barrier("written")
    _let_it_look(saves)
    job.queue.wait()
    barrier("done")
    values = [job.values(f"{number}") for number in (WARM, WARM + 1)]
    barrier("loaded")
    for _ in range(3):
        job.save()
        job.poll()
    with collectives() as seen:
        job.save()
        wait_until(lambda: nostall.is_complete(out / f"{job.next - 1}"))
        barrier("committed")
        again = dict(seen)
        job.poll()
    return {"values": values, "whole": job.are_whole(), "again": again}


def _let_it_look(saves: Sequence[SplitSave]) -> None:
    """Return when the coordinator has looked twice for the other rank's records of each save."""
    looks, are_complete = Counter[int](), Records.are_complete

    def counting(records: Records) -> bool:
        looks[id(records)] += 1
        return are_complete(records)

    def has_looked(early: EarlyCommit) -> bool:
        return not early.is_committing or looks[id(early._records)] > 1

    with patch.object(Records, "are_complete", counting):
        for save in saves:
            if save.early is not None and dist.get_rank() == 0:
                wait_until(partial(has_looked, save.early))


def beside_a_leftover(out: Path) -> dict[str, Any]:
    """A killed run has left a file with the name that rank 1 would take."""
    job = Job(out)
    (out / f"{WARM}").mkdir(exist_ok=True)
    if dist.get_rank() == 1:
        (out / f"{WARM}" / "__1_0.distcp").write_bytes(b"x")
    barrier("made")
    early = early_of(job.save())
    wait_until(lambda: dist.get_rank() != 0 or early.committed > 0)
    job.poll()
    return {"whole": job.is_whole(WARM)}


def after_a_refused_commit(out: Path) -> dict[str, Any]:
    """Three saves in flight: one is refused, one is being committed when all wait, one follows."""
    job = Job(out)
    job.queue = AsyncCallsQueue(on_error="warn")
    is_first = dist.get_rank() == 0
    with inject(Fault.errno("publish", errno.ENOSPC, times=1)) if is_first else nullcontext():
        early = early_of(job.save())
        wait_until(lambda: not is_first or early._ending is not None)
        barrier("refused")
    with Hold("publish" if is_first else "chunk") as hold:
        with inject(hold.fault) if is_first else nullcontext():
            second = early_of(job.save())
            if is_first:
                hold.wait_reached()
        barrier("the second is being committed")
        with nullcontext() if is_first else inject(hold.fault):
            job.save()
        # On rank 0 all wait for the second then; on rank 1 it is finalised.
        threading.Thread(target=_release_when_stopped, args=(hold.release, second)).start()
        job.queue.wait()
    return {"failures": job.queue.failures, "whole": [job.is_whole(WARM + n) for n in range(3)]}


def _release_when_stopped(release: Callable[[], None], early: EarlyCommit) -> None:
    early._stopped.wait(60)
    release()


def one_waits_and_the_other_polls(out: Path) -> dict[str, Any]:
    """While rank 0 commits: as where one rank is about to end."""
    job = Job(out)
    is_first = dist.get_rank() == 0
    with job.held("publish", here=is_first) as (early, release):
        if is_first:
            threading.Thread(target=_release_when_stopped, args=(release, early)).start()
        barrier("committing")
        job.queue.wait() if is_first else job.poll()
    return {"whole": job.is_whole(WARM)}


def keys_of_failed_saves(out: Path) -> dict[str, Any]:
    """How many there are after each of several."""
    job = Job(out)
    job.queue = AsyncCallsQueue(on_error="warn")
    store = dist.distributed_c10d._get_default_store()
    keys = []
    for number in range(8):
        is_failing = dist.get_rank() == 1 and number % 2 == 0
        with inject(Fault.errno("chunk", errno.ENOSPC)) if is_failing else nullcontext():
            job.save_now()
        barrier("failed")
        keys.append(store.num_keys())
        barrier("counted")
    return {"keys": keys, "failures": job.queue.failures}


def without_its_process_group(out: Path, then: str) -> dict[str, Any]:
    """The group is destroyed after the early commit, before anybody finalises.

    Then ranks wait in none, or, in another one, ``give-up``, ``wait-there``, or ``swap`` numbers.
    """
    dist.destroy_process_group()
    store = weakref.ref(_initialise(out / "store 0"))
    job = Job(out)
    job.save()
    wait_until(lambda: job.is_whole(WARM))
    barrier("committed")
    dist.destroy_process_group()
    if then != "wait":
        _initialise(out / "store 1", is_swapped=then == "swap")
    job.queue.close(abort=True) if then == "give-up" else job.queue.wait()
    if then == "wait":
        _initialise(out / "store 1")
    barrier("over")
    for _ in range(2 if then == "wait-there" else 0):
        job.save_now()
    gc.collect()
    whole = [job.is_whole(each) for each in range(WARM, job.next)]
    return {"whole": whole, "store is gone": store() is None}


def ends_after_the_commit(out: Path) -> None:
    """Whoever runs this destroys the group."""
    job = Job(out)
    job.save()
    wait_until(lambda: job.is_whole(WARM))
    barrier("committed")


def too_late_for_its_process_group(out: Path) -> dict[str, Any]:
    """The group is destroyed before the files are written."""
    dist.destroy_process_group()
    _initialise(out / "store 0")
    job, error = Job(out), ""
    with job.held("chunk") as (_, release):
        barrier("held")
        dist.destroy_process_group()
        release()
    try:
        job.queue.wait()
    except RankLostError as raised:
        error = str(raised)
    _initialise(out / "store 1")
    barrier("over")
    is_there = nostall.is_complete(out / f"{WARM}")
    return {"error": error, "is there": is_there, "files": job.files(WARM)}


def _initialise(path: Path, *, is_swapped: bool = False) -> dist.Store:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank = ranks - 1 - rank if is_swapped else rank
    store = dist.FileStore(str(path), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return store


def signalled_before_the_end(out: Path, how: str) -> dict[str, Any]:
    """SIGTERM before a poll of both, and then no further poll; the job has its own handler."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    job, is_first = Job(out), dist.get_rank() == 0
    nostall.drain_on_sigterm(60.0)
    with job.held("chunk") as (_, release):
        if not is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        barrier("signalled")
        job.queue.poll()
        release()
    if how == "one polls" and is_first:
        job.poll()
    elif how == "close":
        job.queue.close()
    else:
        job.queue.wait()
    pending = job.queue.pending
    barrier("over")
    return {"pending": pending, "whole": job.is_whole(WARM)}


def late_on_one_rank(out: Path) -> dict[str, Any]:
    """Its deadline passes while the report is on the way: the report counts, on all ranks."""
    job, is_first, cancel = Job(out), dist.get_rank() == 0, Engine.cancel
    with job.held("chunk", here=not is_first) as (early, release):

        def crossing(engine: Engine, of_job: str, report: Future[Any]) -> None:
            release()
            assert is_done(report, 60.0)
            cancel(engine, of_job, report)

        if not is_first:
            with patch.object(Engine, "cancel", crossing):
                fail_late(job.queue._caller._calls[0], 0.01)
        wait_until(lambda: early._over is not None and early._over.done())
        barrier("late")
        job.queue.wait()
    return {"whole": job.is_whole(WARM)}


def forked(out: Path) -> int:
    """A child that is forked between two polls ends at once; its exit status."""
    job = Job(out)
    with job.held("chunk") as (_, release):
        job.queue.poll()
        barrier("asked")
        child = os.fork()
        if child == 0:
            job.queue.close()
            await_answers(timeout_s=60.0)
            os._exit(0 if not scheduled.unanswered else 1)
        _, status = os.waitpid(child, 0)
        release()
    job.queue.wait()
    return os.waitstatus_to_exitcode(status)


def several_in_one_poll(out: Path) -> list[list[int]]:
    """All that is done is finalised with the first request."""
    job = Job(out)
    saves = [job.save() for _ in range(3)]
    for save in saves:
        wait_until(partial(is_done, save._report))
        wait_until(partial(_is_committed, early_of(save)))
    barrier("committed")
    return [job.queue.poll(), job.queue.poll()]


def an_adapters_poll(out: Path) -> dict[str, Any]:
    """How an adapter's polls treat written saves, and one whose commit is in progress."""
    saves = Saves(remove_checkpoint)

    def begin(number: int) -> Call:
        saves.save({f"rank{_rank()}": torch.ones(1000)}, str(out / f"{number}"))
        return saves._queue._caller._calls[0]

    at_once = []
    for number in range(WARM):
        wait_until(partial(is_done, begin(number).outcome))
        barrier("written")
        saves.poll()
        at_once.append(nostall.verify(out / f"{number}").ok)
        barrier("seen")
    with Hold("publish") as hold, inject(hold.fault) if _rank() == 0 else nullcontext():
        early = begin(WARM).early
        assert early is not None
        if _rank() == 0:
            hold.wait_reached()
        barrier("publishing")
        saves.poll()
        left_alone = saves._queue.pending == 1 and not nostall.is_complete(out / f"{WARM}")
        barrier("polled")
        if _rank() == 0:
            hold.release()
        wait_until(partial(_is_committed, early))
    barrier("committed")
    saves.poll()
    is_over = saves._queue.pending == 0 and nostall.verify(out / f"{WARM}").ok
    saves.close()
    return {"at once": at_once, "left alone": left_alone, "over then": is_over}


def _is_committed(early: EarlyCommit) -> bool:
    return _rank() != 0 or early.committed > 0


def ended(out: Path) -> bool:
    """A rank ends while its thread calls the store, for a second; all is finalised without it."""
    job = Job(out)
    is_in_store, ends = threading.Event(), threading.Event()

    def put(records: Records, record: bytes) -> None:
        del records, record
        is_in_store.set()
        ends.wait()
        for _ in range(100):
            with suppress(dist.DistStoreError):
                dist.HashStore().wait(["what nobody sets"], timedelta(seconds=0.01))

    with patch.object(Records, "put", put):
        job.save()
        assert is_in_store.wait(60)
        job.queue.wait()
    atexit.register(ends.set)
    return job.is_whole(WARM)
