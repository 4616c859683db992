"""Plans that the ranks of ``dcp.save`` have made together, so that later saves refer to them.

Stock DCP gathers the plans of all ranks and scatters the global plan in every save. Here the
coordinator gives each global plan a name. A rank that recognises a state dict sends the name in
place of its plan, and gets the name back; so a change on any rank reaches the coordinator in the
exchange that takes place anyway.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from nostall._commit.known_results import KnownResults
from nostall._plan.planner import serialize
from nostall._save.sent_metadata import PlannedMetadata
from nostall._save.session import KnownSave
from nostall.errors import SaveError

_MOST = 4
"""Global plans, the last used ones, of which a rank remembers its part. The coordinator has twice
as many: a failed save may have got a plan that other ranks have not heard of."""

T = TypeVar("T")


@dataclass(frozen=True)
class NamedPlan(SavePlan):
    """A plan of one rank, with the name of the global plan; without items if the receiver has it.

    Sent in both directions.
    """

    name: str = ""
    position: int = 0
    """Which of the global plan's plans it is."""
    is_known: bool = False
    """Whether the items are left out."""
    results: str | None = None
    """From the coordinator: the token of this rank's results, if it has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """A rank's part of a global plan, and how to recognise its state dict."""

    name: str
    position: int
    configuration: Hashable
    """Identifies the planner's settings and this rank's role."""
    final: SavePlan
    save: KnownSave


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalPlan:
    """On the coordinator: the plans of all ranks, and what they have written by them."""

    name: str
    local: Sequence[SavePlan]
    metadata: Metadata
    results: KnownResults = field(default_factory=KnownResults)

    def metadata_again(self) -> Metadata:
        """Metadata for a save by this plan, without the parts of an earlier one."""
        # The same attributes: a publication is reused only if nothing else has made them.
        again = Metadata.__new__(Metadata)
        vars(again).update(vars(self.metadata))
        again.storage_data = again.storage_meta = None
        return PlannedMetadata(again) if len(self.local) > 1 else again


class KnownPlans:
    """Those of one process group. Thread-safe."""

    def __init__(self) -> None:
        self._mine: OrderedDict[str, KnownPlan | None] = OrderedDict()
        """With those of which this rank cannot recognise its part: the ranks forget together."""
        self._of_all: dict[int, OrderedDict[str, GlobalPlan]] = defaultdict(OrderedDict)
        """By the number of ranks: this process may also save alone, as its own coordinator."""
        self._unanswered: set[str] = set()
        self._lock = threading.Lock()

    # --- a rank ---------------------------------------------------------------------------------

    def recognise(
        self, state_dict: Mapping[str, Any], configuration: Hashable
    ) -> tuple[KnownPlan, list[torch.Tensor | bytes]] | None:
        """The known plan of this state dict, and the sources of its items; ``None`` without one."""
        with self._lock:
            for name in self._unanswered:  # the save failed; the coordinator may not have the plan
                self._mine.pop(name, None)
            self._unanswered.clear()
            candidates = list(reversed(self._mine.values()))
        for known in candidates:
            if known is not None and known.configuration == configuration:
                sources = known.save.structure.find(state_dict, serialize)
                if sources is not None:
                    return known, sources
        return None

    def ask_for(self, known: KnownPlan) -> NamedPlan:
        """What this rank sends in place of its plan."""
        with self._lock:
            self._unanswered.add(known.name)
        return NamedPlan([], name=known.name, position=known.position, is_known=True)

    def note_answer(self, answer: NamedPlan, asked: KnownPlan | None) -> None:
        """Note the plan by which all ranks save, and that it is the answer to a question."""
        with self._lock:
            if asked is not None:
                self._unanswered.discard(asked.name)
            _keep(self._mine, answer.name, self._mine.get(answer.name), _MOST)

    def remember(self, known: KnownPlan) -> None:
        """Remember this rank's part of a plan, by which it saves."""
        with self._lock:
            _keep(self._mine, known.name, known, _MOST)

    # --- the coordinator ------------------------------------------------------------------------

    def answer(
        self,
        plans: Sequence[SavePlan],
        make: Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]],
    ) -> tuple[list[SavePlan], GlobalPlan]:
        """The plans to send to the ranks, and the global plan that they belong to.

        Args:
            plans: Those that the ranks have sent.
            make: Makes the global plan and its metadata from whole plans.

        Raises:
            SaveError: A rank refers to a plan that is not known here.
        """
        known = self._all_refer_to(plans)
        if known is not None:
            tokens = [known.results.token(position) for position in range(len(plans))]
            return [
                NamedPlan([], name=known.name, position=position, is_known=True, results=token)
                for position, token in enumerate(tokens)
            ], known
        local = [self._whole(plan) for plan in plans]
        finals, metadata = make(local)
        made = GlobalPlan(name=uuid.uuid4().hex, local=local, metadata=metadata)
        with self._lock:
            _keep(self._of_all[len(plans)], made.name, made, 2 * _MOST)
        return [
            NamedPlan(**vars(final), name=made.name, position=position)
            for position, final in enumerate(finals)
        ], made

    def _all_refer_to(self, plans: Sequence[SavePlan]) -> GlobalPlan | None:
        """The global plan whose plans these are, in this order, if all are left out."""
        named = [plan for plan in plans if isinstance(plan, NamedPlan)]
        if len(named) != len(plans) or len({plan.name for plan in named}) != 1:
            return None
        if [plan.position for plan in named] != list(range(len(plans))):
            return None
        with self._lock:
            known = self._of_all[len(plans)].get(named[0].name)
            if known is not None:
                _keep(self._of_all[len(plans)], known.name, known, 2 * _MOST)
        return known

    def _whole(self, plan: SavePlan) -> SavePlan:
        if not isinstance(plan, NamedPlan):
            return plan
        with self._lock:
            known = next((of[plan.name] for of in self._of_all.values() if plan.name in of), None)
        if known is None:
            raise SaveError(
                "a rank refers to a plan that the coordinator does not have",
                phase="plan",
                hint="give SavePlanner the process_group of dcp.save; the next save plans anew",
            )
        return known.local[plan.position]


def _keep(kept: OrderedDict[str, T], name: str, value: T, most: int) -> None:
    """Put a value last, and drop the first ones of too many."""
    kept[name] = value
    kept.move_to_end(name)
    while len(kept) > most:
        kept.popitem(last=False)


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, KnownPlans] = weakref.WeakKeyDictionary()
_alone = KnownPlans()
"""Those of a process without process groups."""
_of_groups_lock = threading.Lock()


def known_plans_of(group: dist.ProcessGroup | None) -> KnownPlans:
    """Those of a process group; ``None`` is the default one."""
    group = group or (dist.group.WORLD if dist.is_available() else None)
    if group is None:
        return _alone
    with _of_groups_lock:
        return _of_groups.setdefault(group, KnownPlans())
