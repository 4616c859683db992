"""Plans that ranks have made together, and the names by which they ask for them in later saves.

Stock DCP gathers the plans of all ranks and scatters the global plan in every save. Here the
coordinator gives each global plan a name. A rank that recognises a state dict asks for the plan by
its name, so a change on any rank reaches the coordinator in the exchange that takes place anyway.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from nostall._commit.columns import PlanColumns, compact, in_full
from nostall._commit.publication import KnownResults
from nostall._plan.agree import reusable_metadata
from nostall._plan.planner import PlanShare, serialized
from nostall._save.prepared import KnownSave
from nostall.errors import SaveError

_MOST = 4
"""Global plans, the last used ones, of which a rank remembers its part. The coordinator has twice
as many: a save may fail after some of the ranks have got their plans."""
_MOST_ITEMS = 400_000
"""Fewer plans are remembered if they would have more items, which take 2 kB each."""

T = TypeVar("T")


@dataclass(frozen=True)
class PlanQuestion(SavePlan):
    """A rank's plan without its items, sent to the coordinator, which may have it."""

    ranks: Mapping[str, int] = field(default_factory=dict)
    """By the name of a global plan: the rank whose plan this is."""


@dataclass(frozen=True)
class SentPlan(SavePlan):
    """A rank's plan, which is sent as columns unless the writer has changed it."""

    made: Sequence[WriteItem] = ()
    """The items, as the planner has made them."""

    def __reduce__(self) -> tuple[Any, ...]:
        plan = SavePlan(self.items, self.storage_data, self.planner_data, self.usable)
        columns = compact(plan) if self.items is self.made else plan
        if isinstance(columns, PlanColumns):
            return _received, (columns,)
        return SavePlan, tuple(vars(plan).values())


def _received(columns: PlanColumns) -> SavePlan:
    return SavePlan(ItemsInColumns(columns), planner_data=columns.planner_data)  # type: ignore[arg-type]  # read-only


class ItemsInColumns(Sequence[WriteItem]):
    """Items of a plan that was sent; made while somebody looks at them, a user's writer, say.

    With a ``share``, they are the items of the final plan that it makes of the local one.
    """

    def __init__(self, columns: PlanColumns, share: PlanShare | None = None) -> None:
        self.columns = columns
        self.share = share

    def __len__(self) -> int:
        return len(self.columns.names if self.share is None else self.share.hints)

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self[:])

    def __getitem__(self, position: Any) -> Any:
        plan = in_full(self.columns)
        return (plan if self.share is None else self.share.applied_to(plan)).items[position]

    def __eq__(self, other: object) -> bool:
        return self[:] == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self[:],)


@dataclass(frozen=True)
class PlanAnswer(SavePlan):
    """A rank's part of a global plan, sent by the coordinator.

    Without its items if the rank knows them. Sent without them if it can make them of its own plan.
    """

    name: str = ""
    rank: int = 0
    is_known: bool = False
    asked: bool = False
    """Whether it answers a :class:`PlanQuestion`."""
    most: int = _MOST
    """How many plans to remember, with this one."""
    sent_token: str | None = None
    """The token of this rank's results, if the coordinator has them."""
    share: PlanShare | None = None
    """Turns the rank's own plan into this one, if that is sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        parts = vars(self)
        if isinstance(self.items, ItemsInColumns):
            parts = {**parts, "items": [], "planner_data": None, "share": self.items.share}
        return PlanAnswer, tuple(parts.values())  # by position: one per rank, in each save


# --- a rank ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """A rank's part of a global plan, and how to recognise its state dict."""

    name: str
    rank: int
    configuration: Hashable
    """Identifies the planner's settings and this rank's role."""
    save: KnownSave


@dataclass(frozen=True, slots=True)
class Recognised:
    """A known plan, and what it has to write this time."""

    plan: KnownPlan
    sources: list[torch.Tensor | bytes]


class RankPlans:
    """The plans that a rank can ask for. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, KnownPlan | None] = OrderedDict()
        """Includes plans that this rank cannot recognise: ranks and coordinator forget together."""
        self._unanswered: set[str] = set()
        self._lock = threading.Lock()

    def recognise(
        self, state_dict: Mapping[str, Any], configuration: Hashable
    ) -> dict[str, Recognised]:
        """The known plans of this state dict, by name."""
        with self._lock:
            for name in self._unanswered:  # the save failed; the coordinator may not have the plan
                self._kept.pop(name, None)
            self._unanswered.clear()
            candidates = [plan for plan in self._kept.values() if plan is not None]
        found = {}
        for plan in candidates:
            if plan.configuration == configuration:
                structure = plan.save.structure
                sources = None if structure is None else structure.find(state_dict, serialized)
                if sources is not None:
                    found[plan.name] = Recognised(plan, sources)
        return found

    def ask(self, found: Mapping[str, Recognised]) -> PlanQuestion:
        """The question that this rank sends in place of its plan."""
        with self._lock:
            self._unanswered.update(found)
        ranks = {name: each.plan.rank for name, each in found.items()}
        return PlanQuestion([], planner_data={}, ranks=ranks)

    def note_answer(self, answer: PlanAnswer, asked: Collection[str]) -> None:
        """Note the plan by which all ranks save, and that this rank's question is answered."""
        with self._lock:
            self._unanswered.difference_update(asked)
            _keep(self._kept, answer.name, self._kept.get(answer.name), answer.most)

    def remember(self, plan: KnownPlan) -> None:
        """Remember this rank's part of the plan by which it saves."""
        with self._lock:
            if plan.name in self._kept:
                self._kept[plan.name] = plan


# --- the coordinator ------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class NamedGlobalPlan:
    """On the coordinator: the plans of all ranks, and what they have written by them."""

    name: str
    local: Sequence[SavePlan]
    metadata: Metadata
    most: int
    """How many plans the ranks remember with this one."""
    results: KnownResults = field(default_factory=KnownResults)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the results."""
    is_committed: bool = False
    """Whether a save by it was committed: then it is known which ranks could learn their part."""
    has_failed: bool = False
    """Whether a save by it could not be committed: the next one is planned anew."""

    def metadata_to_complete(self) -> Metadata:
        """Metadata for a save by this plan, of which others may change the entries."""
        metadata = reusable_metadata(self.metadata)
        for name, value in vars(metadata).items():
            if type(value) is dict:
                setattr(metadata, name, dict(value))
        return metadata

    def as_planned(self, metadata: Metadata) -> Metadata:
        """The metadata; as objects that are known to be unchanged, if nobody has changed it."""
        again = reusable_metadata(self.metadata)
        same = vars(metadata).keys() == vars(again).keys() and metadata == again
        return again if same else metadata

    @property
    def is_of_use(self) -> bool:
        """Whether a rank may ask for it: not if no rank could learn its part."""
        ranks = range(len(self.local))
        return not self.is_committed or any(self.results.token(rank) for rank in ranks)


class CoordinatorPlans:
    """The global plans that the ranks of a group may ask for. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[int, OrderedDict[str, NamedGlobalPlan]] = defaultdict(OrderedDict)
        """By number of ranks: this process may also save alone, as its own coordinator."""
        self._lock = threading.Lock()

    def answer(
        self,
        plans: Sequence[SavePlan],
        make: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> tuple[list[SavePlan], NamedGlobalPlan]:
        """The answers to all ranks, and the global plan that they belong to; see :meth:`keep`.

        ``make`` makes the global plan and its metadata from whole plans. ``SaveError`` if a rank
        asks for a plan that is not known here.
        """
        known = self._common(plans)
        if known is not None:
            return [
                PlanAnswer(
                    [],
                    plan.storage_data,
                    name=known.name,
                    rank=rank,
                    is_known=True,
                    asked=True,
                    most=known.most,
                    sent_token=known.results.token(rank),
                )
                for rank, plan in enumerate(plans)
            ], known
        local = [self._whole(plan, rank) for rank, plan in enumerate(plans)]
        finals, metadata = make(local)
        items = sum(len(plan.items) for plan in local)
        most = max(1, min(_MOST, _MOST_ITEMS // max(1, items)))
        made = NamedGlobalPlan(name=uuid.uuid4().hex, local=local, metadata=metadata, most=most)
        return [
            PlanAnswer(
                final.items,
                final.storage_data,
                final.planner_data,
                name=made.name,
                rank=rank,
                asked=isinstance(plans[rank], PlanQuestion),
                most=most,
            )
            for rank, final in enumerate(finals)
        ], made

    def keep(self, plan: NamedGlobalPlan) -> None:
        """Keep a plan that was sent to the ranks: from now on they may ask for it."""
        with self._lock:
            kept = self._kept[len(plan.local)]
            for useless in [each for each in kept.values() if not each.is_of_use]:
                del kept[useless.name]
            _keep(kept, plan.name, plan, 2 * plan.most)

    def _common(self, plans: Sequence[SavePlan]) -> NamedGlobalPlan | None:
        """The last used global plan that all ranks have asked for, each for its part."""
        questions = [plan for plan in plans if isinstance(plan, PlanQuestion)]
        if len(questions) != len(plans):
            return None
        with self._lock:
            kept = self._kept[len(plans)]
            for name, known in reversed(kept.items()):
                ranks = [question.ranks.get(name) for question in questions]
                if ranks == list(range(len(plans))) and not known.has_failed:
                    return known
        return None

    def _whole(self, plan: SavePlan, rank: int) -> SavePlan:
        if not isinstance(plan, PlanQuestion):
            return plan
        with self._lock:
            for name, of_rank in plan.ranks.items():
                for kept in self._kept.values():
                    if name in kept:
                        local = kept[name].local[of_rank]
                        return replace(local, storage_data=plan.storage_data)
        raise SaveError(
            "this rank asks for a plan that the coordinator does not have",
            rank=rank,
            phase="plan",
            hint="give SavePlanner the process_group of dcp.save, whose coordinator has to stay the"
            " same; the next save plans anew",
        )


def _keep(kept: OrderedDict[str, T], name: str, value: T, most: int) -> None:
    """Put a value last, and drop the first ones of too many."""
    kept[name] = value
    kept.move_to_end(name)
    while len(kept) > most:
        kept.popitem(last=False)


# --- process groups -------------------------------------------------------------------------------


class GroupPlans:
    """The plans of a process group that this process knows."""

    def __init__(self) -> None:
        self.of_rank = RankPlans()
        self.of_coordinator = CoordinatorPlans()


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupPlans] = weakref.WeakKeyDictionary()
_alone = GroupPlans()
"""Plans without any process group."""
_lock = threading.Lock()


def plans_of(group: dist.ProcessGroup | None) -> GroupPlans:
    """The known plans of a process group; of the default one for ``None``."""
    group = group or (dist.group.WORLD if dist.is_available() else None)
    if group is None:
        return _alone
    with _lock:
        return _of_groups.setdefault(group, GroupPlans())
