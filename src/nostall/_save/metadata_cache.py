"""The cache of one sequence of saves: plans, the last structure, and the results already sent."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from nostall._commit.known_results import KnownResults
from nostall._model.keywords import also_named
from nostall._model.values import SaveId
from nostall._plan.cache import CachedPlans, same_plan
from nostall._plan.together import GlobalPlan, PlanMemory
from nostall._save.early_commit import Retired
from nostall._save.session import KnownSave
from nostall._save.split_save import SplitSave

_MOST_DIRECTORIES = 10_000
"""Ranks agree to count anew when they have saved to so many."""


class Counted(NamedTuple):
    """What identifies a save by the counts of this rank; nothing before ranks agree on a start."""

    save: SaveId | None = None
    """Among all saves; ``None`` if this rank has begun one that will not be finalised, or may never
    be scheduled: another rank may not have begun that, and would count otherwise."""
    save_here: SaveId | None = None
    """Among those to its directory."""


class CheckpointMetadataCache(PlanMemory):
    """The plans of one sequence of saves. Make one per kind of checkpoint and keep it.

    The methods that frameworks call are a view of :class:`~nostall._plan.together.PlanMemory`.
    Metadata passed in or out is never changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._central: SavePlan | None = None
        self._local: SavePlan | None = None
        self._validated = False
        self.known: KnownSave | None = None
        """The reusable part of the last save that reused a plan."""
        self.sent_token: str | None = None
        """Token of the results that the coordinator has from this rank."""
        self.known_results = KnownResults()
        """On the coordinator, the results of all ranks."""
        self.retired = Retired()
        """What saves that are over have left in the store."""
        self._begun: list[weakref.ref[SplitSave]] = []
        """Saves of the present series that are not finalised."""
        self._saves_to: Counter[str] = Counter()
        """How many saves of the present series went to each directory."""

    def count(self, directory: str) -> Counted:
        """Count a save, before it is planned; forgotten when ranks have planned it together."""
        if self.last_save is None:
            return Counted()
        begun = [reference() for reference in self._begun]
        alike = not any(each is None or each.is_lost or each.is_unscheduled for each in begun)
        self.last_save = self.last_save.next()
        self._saves_to[directory] += 1
        alike &= len(self._saves_to) < _MOST_DIRECTORIES
        here = SaveId(self.last_save.series, self._saves_to[directory])
        return Counted(self.last_save if alike else None, here)

    def begin_series(self, series: int) -> None:
        """Count anew from here on, which all ranks do together."""
        self.last_save = SaveId(series, 0)
        self._begun.clear()
        self._saves_to.clear()

    def begin(self, save: SplitSave) -> None:
        """Note a save that was counted."""
        self._begun.append(weakref.ref(save))

    def note_finalised(self, save: SplitSave | None) -> None:
        """Note that all ranks have finalised a save."""
        self._begun = [each for each in self._begun if each() is not save]

    @also_named(metadata="cached_global_metadata")
    def set_cached_global_metadata(self, metadata: Metadata | None) -> None:
        """Adopt a loaded checkpoint's metadata: the first save after it may reuse its plan."""
        self.adopt_loaded(metadata)

    def set_cache_metadata(
        self, central_plan: SavePlan, local_plan: SavePlan, global_md_verify_reuse: bool
    ) -> None:
        """Remember a plan; the second equal one in a row makes the cache valid on this rank."""
        self._validated = self._central is not None and same_plan(self._central, central_plan)
        self._central, self._local = central_plan, local_plan
        self.verified_loaded = global_md_verify_reuse

    def prepare_save_state_dict_ret(
        self, rank: int, coordinator: int, save_state_dict_ret: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        """The tuple, with metadata filled in on the coordinator if planning was skipped."""
        writer, metadata, wrapper = save_state_dict_ret
        if rank == coordinator:
            if metadata is None:
                metadata = self.reusable_metadata()
            else:
                self._metadata = metadata
        return writer, metadata, wrapper

    def get_cache_metadata(
        self,
    ) -> tuple[SavePlan | None, SavePlan | None, bool, Sequence[SavePlan] | None]:
        """``(central_plan, local_plan, validated_cache_reuse, loaded_all_plans)``."""
        return self._central, self._local, self._validated, self.loaded_all_plans

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """``(validated_cache_reuse, validated_loaded_metadata_reuse)``."""
        return self._validated, self.verified_loaded

    def keep(self, plans: CachedPlans, made: GlobalPlan | None) -> None:
        """Remember a plan that all ranks made together."""
        super().keep(plans, made)
        self._central, self._local = plans.final, plans.local
        self._validated = plans.validated  # as agreed by all ranks, not as this rank sees it
        self.known = self.sent_token = None
        self.known_results = KnownResults()
        self._begun.clear()
        self._saves_to.clear()

    def forget(self) -> None:
        """Plan the next save together."""
        super().forget()
        self._central = self._local = self.known = self.sent_token = None
        self.known_results = KnownResults()
        self._validated = False
