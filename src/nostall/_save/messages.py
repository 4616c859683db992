"""What ranks and the coordinator tell each other when a split save ends."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from nostall import _torch
from nostall._commit.known_results import RankOutcome
from nostall._model.completion import SaveId
from nostall._model.values import RankFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessage:
    """Sent by each rank to the coordinator when it finalises."""

    outcome: RankOutcome
    written: RankFiles
    changed_plan: SavePlan | None
    save: SaveId | None
    """``None`` if this rank may count otherwise than others."""
    took_s: float
    """From the start of planning until the files were durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a save ended; sent by the coordinator to every rank."""

    failures: dict[int, _torch.WrappedException]
    published: bool
    """Whether the metadata is published, or may be; after a failure, too."""
    changed: bool
    """Whether the next save is planned together, as a rank's structure has changed."""
    series: int | None = None
    """A new one of identities, if ranks may count their saves differently."""
    slowest_rank: int | None = None
