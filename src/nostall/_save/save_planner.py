"""``SavePlanner``: DCP's planner for ``dcp.save`` and ``dcp.async_save``, which plans once."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as DCPSavePlanner

from nostall._commit.known_results import KnownResults
from nostall._engine import Engine
from nostall._plan.items import Resolver, require_representable
from nostall._plan.structure import learn
from nostall._save import session
from nostall._save.known_plans import GlobalPlan, KnownPlan, KnownPlans, NamedPlan, known_plans_of
from nostall._save.settings import SaveTarget

_log = logging.getLogger("nostall")


class SavePlanner(DefaultSavePlanner):
    """DCP's default planner, which recognises a state dict whose structure was saved before.

    With a :class:`~nostall.FileSystemWriterAsync`, the second save of a structure plans nothing:
    ranks exchange names of plans and of results instead of all items. Every change of structure, on
    any rank, is noticed. ``dcp.save`` returns the metadata on all ranks as ever; other ranks than
    the coordinator read it from the checkpoint when they look at it.

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
        self._plans: KnownPlans | None = None
        self._given: dict[str, Any] = {}
        self._recognised: tuple[KnownPlan, list[torch.Tensor | bytes]] | None = None
        self._answer: NamedPlan | None = None
        self._global_plan: GlobalPlan | None = None
        self._is_flat = False

    # --- DCP's planner --------------------------------------------------------------------------

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # DCP's
    ) -> None:
        """Recognise the state dict, or flatten it."""
        del storage_meta
        self.let_go()
        self._given, self.is_coordinator = state_dict, is_coordinator
        self._answer = self._global_plan = self._recognised = self._plans = None
        if self._plans_once:
            self._plans = known_plans_of(self._group)
            self._recognised = self._plans.recognise(state_dict, self._configuration)
        if self._recognised is None:
            self._flatten()

    def create_local_plan(self) -> SavePlan:
        """This rank's plan; its name if it is known."""
        if self._plans is not None and self._recognised is not None:
            return self._plans.ask_for(self._recognised[0])
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans to send to the ranks, and the metadata.

        Raises:
            SaveError: A rank refers to a plan of another process group.
        """
        if self._plans is None:
            return super().create_global_plan(all_plans)
        answers, self._global_plan = self._plans.answer(all_plans, super().create_global_plan)
        return answers, self._global_plan.metadata_again()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's final plan, with all its items."""
        if not isinstance(new_plan, NamedPlan):  # of a coordinator with another planner
            return super().finish_plan(new_plan)
        known = None if self._recognised is None else self._recognised[0]
        if self._plans is not None:
            self._plans.note_answer(new_plan, known)
        self._answer = new_plan
        if known is not None and new_plan.is_known:
            return replace(known.final, storage_data=new_plan.storage_data)
        if known is not None:  # another rank's structure has changed
            self._recognised = None
            self._flatten()
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The object behind an item."""
        if not self._is_flat:  # for another writer, or one with other options than last time
            self._flatten()
        return super().lookup_object(index)

    # --- a nostall writer's part ----------------------------------------------------------------

    def prepared(self, plan: SavePlan, target: SaveTarget, engine: Engine) -> session.PreparedSave:
        """As :func:`~nostall._save.session.prepare`, and remember the structure.

        Raises:
            StagingError: An item could not be resolved.
        """
        file_format = target.settings.options.file_format
        if self._recognised is not None:
            known, sources = self._recognised
            if known.save.naming.file_format is file_format:
                return session.prepare_known(known.save, sources, target=target, engine=engine)
            require_representable(plan, file_format, rank=target.settings.rank)
        prepared = session.prepare(plan, self, target=target, engine=engine)
        plans, answer = self._plans, self._answer
        if plans is None or answer is None or target.settings.transform_descriptors is not None:
            return prepared
        save = self._learned(prepared, engine)
        if save is None:
            return prepared
        plans.remember(
            KnownPlan(
                name=answer.name,
                position=answer.position,
                configuration=self._configuration,
                final=plan,
                save=save,
            )
        )
        return replace(prepared, known=save)

    @property
    def known_results(self) -> KnownResults | None:
        """On the coordinator: the results of earlier saves by the present plan."""
        return None if self._global_plan is None else self._global_plan.results

    @property
    def token_there(self) -> str | None:
        """The token of this rank's results that the coordinator has."""
        return None if self._answer is None else self._answer.results

    def let_go(self) -> None:
        """Keep no tensor of the save alive."""
        self._given, self._recognised = {}, None
        self.state_dict, self._is_flat = {}, False

    # --- details --------------------------------------------------------------------------------

    @property
    def _plans_once(self) -> bool:
        is_usual = self.flatten_state_dict and self.flatten_sharded_tensors
        return is_usual and type(self) is SavePlanner

    @property
    def _configuration(self) -> Hashable:
        return self.is_coordinator, self.dedup_save_to_lowest_rank

    def _learned(self, prepared: session.PreparedSave, engine: Engine) -> session.KnownSave | None:
        if not self._is_flat:
            self._flatten()
        try:
            structure = learn(self._given, self.state_dict, prepared.planned)
        except Exception:  # this save is not affected; the next one is planned
            _log.debug("the structure was not learned", exc_info=True)
            return None
        return None if structure is None else session.known(prepared, structure, engine)

    def _flatten(self) -> None:
        super().set_up_planner(self._given, is_coordinator=self.is_coordinator)
        self._is_flat = True


def prepare(
    plan: SavePlan, resolver: Resolver, *, target: SaveTarget, engine: Engine
) -> session.PreparedSave:
    """As :func:`~nostall._save.session.prepare`; a :class:`SavePlanner` remembers the structure.

    Raises:
        StagingError: An item could not be resolved.
    """
    if isinstance(resolver, SavePlanner):
        return resolver.prepared(plan, target, engine)
    return session.prepare(plan, resolver, target=target, engine=engine)


def for_split_saves(planner: DCPSavePlanner) -> DCPSavePlanner:
    """Stock's planner in place of a :class:`SavePlanner`: split saves have a cache of their own."""
    if type(planner) is not SavePlanner:
        return planner
    return DefaultSavePlanner(
        planner.flatten_state_dict,
        planner.flatten_sharded_tensors,
        dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
    )
