"""Saves by ``dcp.save`` and ``dcp.async_save`` with ``nostall.SavePlanner``, on real ranks."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import nostall
from nostall._plan.planner import plan_columns
from nostall._save import plans_by_name as plans
from nostall.errors import ReadError
from programs.entry_points import State
from programs.planning import CHANGES, WHERE, changed, collectives, make_state
from programs.simulated import lengths
from support.faults import Fault, inject
from support.states import begin_async, blobs, read_metadata


@contextmanager
def plannings() -> Iterator[Callable[[], int]]:
    """How many plans of a rank, and global plans in full, this rank has made in the block."""
    local = default_planner.create_default_local_save_plan
    whole = default_planner.create_default_global_save_plan
    with (
        patch("nostall._save.planner_by_name.plan_columns", wraps=plan_columns) as columns,
        patch.object(default_planner, local.__name__, wraps=local) as locals_,
        patch.object(default_planner, whole.__name__, wraps=whole) as wholes,
    ):
        yield lambda: columns.call_count + locals_.call_count + wholes.call_count


def save(path: Path, state: State, **options: Any) -> Metadata:
    """One save with a planner of its own."""
    options["planner"] = options.get("planner") or nostall.SavePlanner()
    writer = nostall.FileSystemWriterAsync(path)
    saved: Metadata = dcp.save(state, storage_writer=writer, **options)
    return saved


def is_as_by_stocks(path: Path, state: State, **options: Any) -> bool:
    """Whether a checkpoint is what ``DefaultSavePlanner`` makes of the state. Collective."""
    other = path.with_name(f"{path.name} planned by stock")
    save(other, state, planner=dcp.DefaultSavePlanner(), **options)
    mine, stocks = read_metadata(path), read_metadata(other)
    return (
        blobs(path) == blobs(other)
        and nostall.verify(path).ok
        and mine.state_dict_metadata == stocks.state_dict_metadata
        and mine.planner_data == stocks.planner_data
        and mine.storage_data.keys() == stocks.storage_data.keys()
        and type(mine) is Metadata
    )


def is_saved_as_by_stocks(path: Path, state: State, planner: Any = None, **options: Any) -> bool:
    """Save it first. Collective."""
    save(path, state, planner=planner, **options)
    return is_as_by_stocks(path, state)


def wide_state(seed: int) -> State:
    """Many small tensors of each rank, so that plans and results are long."""
    return {
        **make_state(seed),
        **{f"{dist.get_rank()} {n}": torch.full((4,), seed + n) for n in range(500)},
    }


def steady(out: Path) -> list[dict[str, Any]]:
    """Three saves with new values: what is planned, sent and written."""
    found = []
    for number in range(3):
        with lengths() as sent, plannings() as made, collectives() as said:
            metadata = save(out / f"{number}", wide_state(number))
        found.append(
            {
                "sent": max(sent.values()),
                "planned": made(),
                "said": dict(said),
                "returned": metadata == read_metadata(out / f"{number}"),
                "is right": is_as_by_stocks(out / f"{number}", wide_state(number)),
            }
        )
    return found


def changes(out: Path) -> dict[str, bool]:
    """After each change on some ranks, and back: every save is right."""
    found = {}
    for where in WHERE:
        for kind in CHANGES:
            for number, state in enumerate(
                (make_state(1), make_state(2), changed(make_state(3), kind, where), make_state(4))
            ):
                path = out / f"{where} {kind} {number}"
                found[path.name] = is_saved_as_by_stocks(path, state)
    return found


def alternating(out: Path, who: str) -> dict[str, Any]:
    """Three structures in turns, of all ranks or of one: each combination is planned once."""
    planned, right = [], []
    for number in range(9):
        state, path = make_state(number), out / f"{number}"
        for more in range(number % 3 if who == "all" or dist.get_rank() == 1 else 0):
            state[f"more {more}"] = torch.full((2,), number)
        with plannings() as made:
            save(path, state)
        planned.append(made())
        right.append(is_as_by_stocks(path, state))
    return {"planned": planned, "right": right}


class _Unserialisable:
    def __init__(self, *, is_refused: bool) -> None:
        self.is_refused = is_refused

    def __getstate__(self) -> dict[str, Any]:
        if self.is_refused:
            raise ValueError("an object that refuses")
        return vars(self)


FAILURES = {
    2: "an object that refuses",
    4: "an object that refuses",
    6: "No space left",
    8: "Input/output error",
}
"""Why some of ten saves fail: rank 1 plans or writes, the coordinator publishes."""


def failing(out: Path) -> dict[str, Any]:
    """All ranks learn of each failure; later saves are right, though callers change metadata."""
    found: dict[str, Any] = {"errors": [], "left": [], "right": []}
    rank = dist.get_rank()
    faults = {
        (6, 1): [Fault.errno("chunk", errno.ENOSPC)],
        (8, 0): [Fault.errno("publish", errno.EIO)],
    }
    for number in range(10):
        is_refused = number in (2, 4) and rank == 1
        state = {**make_state(number), f"of {rank}": _Unserialisable(is_refused=is_refused)}
        path = out / f"{number}"
        with inject(*faults.get((number, rank), [])):
            try:
                metadata = save(path, state)
            except CheckpointException as error:
                found["errors"].append(FAILURES[number] in str(error))
                if FAILURES[number] == "Input/output error":
                    found["left"] = sorted(os.listdir(path))
                continue
        found["right"].append(is_as_by_stocks(path, state))
        metadata.state_dict_metadata.clear()
        metadata.storage_data.clear()
        metadata.planner_data.clear()
    return found


def forgetting(out: Path, most_items: str) -> list[bool]:
    """A structure comes back after more saves than are remembered, by all ranks or by one."""
    right: list[bool] = []

    def save_known() -> None:
        number = len(right)
        right.append(is_saved_as_by_stocks(out / f"known {number}", make_state(number)))

    with patch.object(plans, "_MOST_ITEMS", int(most_items)):
        _save_many_others(out, save_known)
    return right


def _save_many_others(out: Path, save_known: Callable[[], None]) -> None:
    """Five saves of a known structure, with many of others between them."""
    save_known()
    is_first = dist.get_rank() == 0
    for number in range(10):
        if is_first:
            save(out / f"alone {number}", {f"{number}": torch.ones(2)}, no_dist=True)
    save_known()
    for number in range(10):  # of a structure that cannot be recognised
        save(out / f"sparse {number}", {"sparse": torch.eye(3).to_sparse()})
    save_known()
    for number in range(10):  # of one that changes on one rank only
        more = {f"{number}": torch.ones(2)} if is_first else {}
        save(out / f"changing {number}", {**make_state(0), **more})
    save_known()
    for number in range(10):  # of some that the coordinator's writer refuses
        with suppress(CheckpointException):
            writer = _Refusing(out / f"refused {number}")
            state = {**make_state(0), f"{number}": torch.ones(2)}
            dcp.save(state, storage_writer=writer, planner=nostall.SavePlanner())
    save_known()


class _Refusing(nostall.FileSystemWriterAsync):
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        raise OSError(len(plans), "the plans are refused")


def other_groups(out: Path, is_told: str) -> dict[str, Any]:
    """All ranks save, then some of them without the first one, and so on. Three ranks."""
    some = dist.new_group([1, 2])
    errors, right = [], []
    for number in range(4):
        state = {"shared": torch.full((5,), number), "own": {"number": number}}
        save(out / f"all {number}", state)
        right.append(is_as_by_stocks(out / f"all {number}", state))
        if dist.get_rank() == 0:
            continue
        group = some if is_told == "told" else None
        path = out / f"some {number}"
        options = {"process_group": some}
        try:
            planner = nostall.SavePlanner(process_group=group)
            save(path, state, planner=planner, **options)
        except CheckpointException as error:
            errors.append("give SavePlanner the process_group" in str(error))
        else:
            right.append(is_as_by_stocks(path, state, **options))
    return {"errors": errors, "right": all(right)}


def replaced(out: Path) -> dict[str, Any]:
    """Several saves to one directory, and what an earlier one has returned."""
    returned, right = [], []
    for number in range(4):
        returned.append(save(out / "one", make_state(number)))
        right.append(is_as_by_stocks(out / "one", make_state(number)))
    last = list(returned[-1].state_dict_metadata)
    try:
        keys = list(returned[0].state_dict_metadata)
    except ReadError as error:
        return {"right": right, "last": len(last), "first": error.message}
    return {"right": right, "last": len(last), "first": len(keys)}


def in_background(out: Path, staging: str) -> dict[str, Any]:
    """``dcp.async_save`` with one planner for all saves."""
    planner, planned, right = nostall.SavePlanner(), [], []
    for number in range(4):
        path = out / f"{number}"
        writer = nostall.FileSystemWriterAsync(path, staging=staging)  # type: ignore[arg-type]  # one of the modes
        with plannings() as made:
            begin_async(writer, make_state(number), planner=planner).result()
        planned.append(made())
        right.append(is_as_by_stocks(path, make_state(number)))
    return {"planned": planned, "right": right}


class Reversing(dcp.FileSystemWriter):
    """Writes items in another order."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        return replace(plan, items=list(reversed(plan.items)))


class Rebuilding(dcp.FileSystemWriter):
    """Makes plans of its own of those that it gets."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        return [SavePlan([*each.items], each.storage_data, each.planner_data) for each in plans]


_OF_NOSTALL: list[Any] = [
    type(f"{kind.__name__}Async", (kind, nostall.FileSystemWriterAsync), {})
    for kind in (Reversing, Rebuilding)
]


def with_other_writers(out: Path) -> dict[str, list[bool]]:
    """Some that change plans, or copy them, and stock's, before and after nostall's."""
    right: dict[str, list[bool]] = {}
    for make_writer in (Reversing, Rebuilding, *_OF_NOSTALL, dcp.FileSystemWriter):
        for number in range(2):
            state, path = make_state(number), out / f"{make_writer.__name__} {number}"
            other, planner = path.with_name(f"{path.name} by stock's"), dcp.DefaultSavePlanner()
            dcp.save(state, storage_writer=make_writer(other), planner=planner)
            dcp.save(state, storage_writer=make_writer(path), planner=nostall.SavePlanner())
            pickled = (path / ".metadata").read_bytes()
            is_readable = make_writer in _OF_NOSTALL or b"nostall" not in pickled
            right.setdefault(make_writer.__name__, []).append(
                blobs(path) == blobs(other) and is_readable
            )
            if make_writer is dcp.FileSystemWriter:
                save(path.with_name(f"{path.name} too"), state)
    return right


def without_collectives(out: Path) -> list[bool]:
    """Each rank makes a checkpoint of its own, between saves of all of them."""
    right = []
    rank = dist.get_rank()
    for number in range(6):
        state, path = make_state(number), out / f"{number}"
        if number in (0, 3):
            right.append(is_saved_as_by_stocks(path, state))
            continue
        options = {"use_collectives": False}
        save(path, state, **options)
        other = out / f"{number} planned by stock"
        save(other, state, planner=dcp.DefaultSavePlanner(), **options)
        name = f"__{rank}.metadata"
        mine, stocks = (pickle.loads((each / name).read_bytes()) for each in (path, other))
        right.append(mine.state_dict_metadata == stocks.state_dict_metadata)
        right.append(mine.storage_data == stocks.storage_data)
    return right


def other_planners(out: Path) -> dict[str, Any]:
    """The coordinator has another planner than a rank that knows a plan."""
    errors, right = [], []
    for number in range(6):
        state, path = make_state(number), out / f"{number}"
        del state["sharded"]  # stock's planner itself misses a part of it
        is_stocks = number == 2 and dist.get_rank() == 0
        try:
            save(path, state, planner=dcp.DefaultSavePlanner() if is_stocks else None)
        except CheckpointException as error:
            errors.append("use nostall.SavePlanner on all ranks" in str(error))
        else:
            right.append(is_as_by_stocks(path, state))
    return {"errors": errors, "right": right}


def one_object_grows(out: Path) -> list[bool]:
    """The pickle of an object becomes longer on one rank, and shorter again."""
    right = []
    for number in range(5):
        state, path = make_state(number), out / f"{number}"
        text = "x" * (1000 if number == 2 and dist.get_rank() == 1 else 5)
        state[f"text of {dist.get_rank()}"] = text
        right.append(is_saved_as_by_stocks(path, state))
    return right


def through_a_tier(out: Path) -> list[bool]:
    """Metadata is sent in full: other hosts may not see the tier."""
    right = []
    for number in range(3):
        state, path = make_state(number), out / f"{number}"
        writer = nostall.FileSystemWriterAsync(path, local_staging_dir=out / "tier")
        metadata = dcp.save(state, storage_writer=writer, planner=nostall.SavePlanner())
        right.append(type(metadata) is Metadata)
        if writer.promotion is not None:
            writer.promotion.result(60)
        dist.barrier()
        right.append(is_as_by_stocks(path, state))
    return right


def returned(out: Path) -> dict[str, Any]:
    """Whether metadata that nobody has looked at can be copied, pickled, compared and printed."""
    state = make_state(1)
    first, second, third = (save(out / f"{number}", state) for number in range(3))
    on_disk = [read_metadata(out / f"{number}") for number in range(3)]
    copied, deep = copy(first), deepcopy(second)
    pickled = pickle.loads(pickle.dumps(third))
    changed = save(out / "4", state)
    changed.planner_data = "of the caller"
    return {
        "copied": copied == on_disk[0] and on_disk[0] == first,
        "deep": deep == on_disk[1] and on_disk[1] == second,
        "pickled": pickled == on_disk[2],
        "type": isinstance(first, Metadata),
        "said": "state_dict_metadata" in repr(first),
        "set": bool(changed.state_dict_metadata) and changed.planner_data == "of the caller",
    }


def groups_come_and_go(out: Path) -> list[bool]:
    """A process group is destroyed and made again."""
    right = []
    for number in range(4):
        group = dist.new_group(backend="gloo")
        for more in range(2):
            path, planner = out / f"{number} {more}", nostall.SavePlanner(process_group=group)
            options = {"planner": planner, "process_group": group}
            right.append(is_saved_as_by_stocks(path, make_state(number), **options))
        dist.destroy_process_group(group)
    return right
