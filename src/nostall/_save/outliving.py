"""Saves that outlive their trainer: what the writer process needs to leave a completion record.

The record of each rank says where its items are, and that its files are complete; the coordinator's
also has the metadata that the ranks have planned. ``nostall.recover`` commits from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import StorageMeta

from nostall._commit.publication import end_of_program
from nostall._model.completion import RecordName
from nostall._model.jobs import Completion
from nostall._save.session import PreparedSave
from nostall._save.written import pickled_results


@dataclass(frozen=True, slots=True, kw_only=True)
class Outliving:
    """One rank's part of a save that outlives the trainer."""

    name: RecordName
    began_s: float
    """When it was planned, in seconds since the epoch."""
    metadata: bytes
    """On the coordinator, pickled; else empty."""

    @classmethod
    def planned_now(
        cls,
        name: RecordName,
        planned: bytes,
        storage_meta: Callable[[], StorageMeta | None],
    ) -> Outliving:
        """The completion of a save that has just been planned.

        Args:
            name: Of the record.
            planned: On the coordinator, the planned metadata as a pickle without its end.
            storage_meta: Returns DCP's part of the metadata that is specific to this save.
        """
        metadata = planned + end_of_program(storage_meta()) if planned else b""
        return cls(name=name, began_s=time.time(), metadata=metadata)

    def completion(self, prepared: PreparedSave) -> Completion:
        """What the writer process leaves."""
        return Completion(
            name=str(self.name),
            began_s=self.began_s,
            results=pickled_results(prepared),
            metadata=self.metadata,
            linked=prepared.linked,
            linger_s=prepared.target.settings.options.linger_s,
        )
