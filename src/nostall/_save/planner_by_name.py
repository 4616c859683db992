"""``SavePlanner``: DCP's planner for ``dcp.save`` and ``dcp.async_save``, which plans once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from nostall._model.threads import gc_paused
from nostall._plan.items import require_representable
from nostall._plan.planner import plan_columns, require_one_shape
from nostall._save.plans_by_name import (
    GroupPlans,
    ItemsInColumns,
    KnownPlan,
    NamedGlobalPlan,
    PlanAnswer,
    PlanQuestion,
    Recognised,
    SentPlan,
    plans_of,
)
from nostall._save.prepared import PreparedSave, SaveTarget, as_known, learn, prepare, prepare_known
from nostall.errors import SaveError


class SavePlanner(DefaultSavePlanner):
    """DCP's default planner, which recognises a state dict whose structure was saved before.

    With a :class:`~nostall.FileSystemWriterAsync`, a save plans nothing if its ranks have saved the
    same structures together before: they exchange names of plans and of results instead of all
    items. Every change of structure, on any rank, is noticed. ``dcp.save`` returns the metadata on
    all ranks; other ranks than the coordinator read it from the checkpoint when they look at it.

    What is known about a structure belongs to the process group, so a planner may be made for each
    save. The plans and the files are those of ``DefaultSavePlanner``. A subclass plans every save.

    Args:
        flatten_state_dict: As of ``DefaultSavePlanner``; ``False`` plans every save.
        flatten_sharded_tensors: As of ``DefaultSavePlanner``; ``False`` plans every save.
        dedup_save_to_lowest_rank: Whether replicated tensors are written by the lowest rank.
        process_group: That of ``dcp.save``; the default group if ``None``.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,  # noqa: FBT001, FBT002  # DCP's
        flatten_sharded_tensors: bool = True,  # noqa: FBT001, FBT002  # DCP's
        *,
        dedup_save_to_lowest_rank: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            flatten_state_dict,
            flatten_sharded_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        self._group = process_group
        self._begin(None)

    def _begin(self, state_dict: dict[str, Any] | None) -> None:
        self._plans: GroupPlans | None = None
        """``None`` if every save is planned."""
        self._given = state_dict
        """The state dict, until the save is prepared."""
        self._recognised: dict[str, Recognised] = {}
        self._answer: PlanAnswer | None = None
        self.named_plan: NamedGlobalPlan | None = None
        """On the coordinator, that of the present save."""

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_group": None}  # another process has its own groups
        if self._plans is not None:
            state.pop("state_dict", None)
            state.update(dict.fromkeys(("_plans", "_given", "_answer", "named_plan")))
            state["_recognised"] = {}
        return state

    # --- DCP's planner --------------------------------------------------------------------------

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # DCP's
    ) -> None:
        """Recognise the state dict, or flatten it."""
        is_usual = self.flatten_state_dict and self.flatten_sharded_tensors
        if not is_usual or type(self) is not SavePlanner:  # every save is planned
            self._begin(None)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            return
        self._begin(state_dict)
        vars(self).pop("state_dict", None)
        self.is_coordinator = is_coordinator
        self._plans = plans_of(self._group)
        self._recognised = self._plans.of_rank.recognise(state_dict, self._configuration)
        if not self._recognised:
            self._flatten()

    @gc_paused()
    def create_local_plan(self) -> SavePlan:
        """This rank's plan; a question if it is known."""
        if self._plans is not None and self._recognised:
            return self._plans.of_rank.ask(self._recognised)
        plan = super().create_local_plan()
        return plan if self._plans is None else SentPlan(**vars(plan), made=plan.items)

    @gc_paused()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The answers to the ranks, and the metadata.

        Raises:
            SaveError: A rank asks for a plan of another process group.
        """
        if self._plans is None:
            return super().create_global_plan(all_plans)
        if not self.is_coordinator:  # use_collectives=False: each rank plans alone
            return super().create_global_plan(list(map(self._planned_here, all_plans)))
        answers, self.named_plan = self._plans.of_coordinator.answer(all_plans, self._plan_globally)
        return answers, self.named_plan.metadata_to_complete()

    def _plan_globally(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The global plan; from columns, if all plans have come so."""
        items: list[Any] = [each.items for each in plans]
        columns = [each.columns for each in items if isinstance(each, ItemsInColumns)]
        made = None
        if len(columns) == len(plans):
            require_one_shape(columns)
            made = plan_columns(columns, to_lowest_rank=self.dedup_save_to_lowest_rank)
        if made is None:
            return super().create_global_plan(plans)
        shares, metadata = made
        finals: list[Any] = list(map(ItemsInColumns, columns, shares))
        return [
            replace(plan, items=final) for plan, final in zip(plans, finals, strict=True)
        ], metadata

    @gc_paused()
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's final plan, with all its items.

        Raises:
            SaveError: The coordinator has another planner, or a writer has replaced this rank's
                question, or its answer if it had asked for several plans.
        """
        if isinstance(new_plan, PlanQuestion):
            raise SaveError(
                "the coordinator has another planner, which cannot answer this rank",
                phase="plan",
                hint="use nostall.SavePlanner on all ranks, or on none",
            )
        if self._plans is None or not isinstance(new_plan, PlanAnswer):
            if self._recognised and not new_plan.items:
                # A writer has made a new plan of the answer to this rank's question.
                if len(self._recognised) > 1:
                    raise _replaced_by("prepare_global_plan")
                (only,) = self._recognised.values()
                return replace(only.plan.save.share.plan, storage_data=new_plan.storage_data)
            self._recognised = {}
            return super().finish_plan(new_plan)
        if self._recognised and not new_plan.asked:
            raise _replaced_by("prepare_local_plan")
        self._answer = new_plan
        if self.named_plan is not None:
            self._plans.of_coordinator.keep(self.named_plan)
        self._plans.of_rank.note_answer(new_plan, self._recognised)
        known = self._recognised.get(new_plan.name)
        if known is not None and new_plan.is_known:
            self._recognised = {new_plan.name: known}
            return replace(known.plan.save.share.plan, storage_data=new_plan.storage_data)
        if self._recognised:  # the structure of another rank has changed
            self._recognised = {}
            self._flatten()
            super().create_local_plan()
        final: SavePlan = new_plan
        if new_plan.share is not None:
            share = new_plan.share._replace(storage_data=new_plan.storage_data)
            final = share.applied_to(self.plan)
        return super().finish_plan(final)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The object behind an item.

        Raises:
            SaveError: The save is over.
        """
        if "state_dict" not in vars(self):  # for another writer, or one with other options
            self._flatten()
        return super().lookup_object(index)

    # --- the part of nostall's writer -----------------------------------------------------------

    def prepare(self, plan: SavePlan, target: SaveTarget) -> PreparedSave:
        """Resolve and lay out a final plan, and remember the structure.

        Raises:
            StagingError: An item could not be resolved.
        """
        settings = target.settings
        for known in self._recognised.values():
            if known.plan.save.naming.file_format is settings.file_format:
                return prepare_known(known.plan.save, known.sources, target)
            require_representable(plan, settings.file_format, rank=settings.rank)
        prepared = prepare(plan, self, target)
        plans, answer, given = self._plans, self._answer, self._given
        has_streams = settings.transform_descriptors is not None
        if has_streams or plans is None or answer is None or given is None:
            return prepared
        if "state_dict" not in vars(self):
            self._flatten()
        save = learn(prepared, given, self.state_dict)
        if save is None or save.structure is None:  # it could not be recognised safely
            return prepared
        plan_of_rank = KnownPlan(
            name=answer.name, rank=answer.rank, configuration=self._configuration, save=save
        )
        plans.of_rank.remember(plan_of_rank)
        return as_known(prepared, save)

    @property
    def sent_token(self) -> str | None:
        """The token of this rank's results, if the coordinator has them."""
        return None if self._answer is None else self._answer.sent_token

    def forget_state(self) -> None:
        """Keep no tensor of the save alive."""
        if self._plans is not None:
            self._given, self._recognised = None, {}
            vars(self).pop("state_dict", None)

    # --- details --------------------------------------------------------------------------------

    @property
    def _configuration(self) -> Hashable:
        return self.is_coordinator, self.dedup_save_to_lowest_rank

    @gc_paused()
    def _flatten(self) -> None:
        if self._given is None:
            raise SaveError(
                "the save of this planner is over",
                phase="plan",
                hint="call set_up_planner for another one",
            )
        super().set_up_planner(self._given, is_coordinator=self.is_coordinator)

    def _planned_here(self, plan: SavePlan) -> SavePlan:
        if not isinstance(plan, PlanQuestion):
            return plan
        self._recognised = {}
        self._flatten()
        return replace(super().create_local_plan(), storage_data=plan.storage_data)


def _replaced_by(method: str) -> SaveError:
    return SaveError(
        f"the writer's {method} has made a new plan in place of this rank's",
        phase="plan",
        hint="have it change plans by dataclasses.replace, or use DCP's DefaultSavePlanner",
    )
