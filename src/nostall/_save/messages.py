"""What ranks and the coordinator tell each other when a split save ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from nostall import _torch
from nostall._commit.known_results import RankOutcome, ResultsReference
from nostall._model.completion import SaveId
from nostall._model.values import RankFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessage:
    """Sent by each rank to the coordinator when it finalises."""

    outcome: RankOutcome
    written: RankFiles
    changed_plan: SavePlan | None
    save_here: SaveId | None
    """What identifies it among those to its directory; ``None`` if it was not counted."""
    counts_alike: bool
    """Whether all ranks are known to count saves alike."""
    took_s: float
    """From the start of planning until the files were durable."""

    def __reduce__(self) -> tuple[Any, ...]:
        """In one call with plain values, as far as possible: see :class:`RankFiles`."""
        outcome: Any = self.outcome
        is_reference = isinstance(outcome, ResultsReference)
        return _rank_message, (
            (outcome.token, outcome.files) if is_reference else outcome,
            is_reference,
            self.written,
            self.changed_plan,
            self.save_here and (self.save_here.series, self.save_here.number),
            self.counts_alike,
            self.took_s,
        )


def _rank_message(
    outcome: Any,
    is_reference: bool,  # noqa: FBT001  # pickled by position
    written: RankFiles,
    changed_plan: SavePlan | None,
    save_here: tuple[int, int] | None,
    counts_alike: bool,  # noqa: FBT001  # pickled by position
    took_s: float,
) -> RankMessage:
    return RankMessage(
        outcome=ResultsReference(token=outcome[0], files=outcome[1]) if is_reference else outcome,
        written=written,
        changed_plan=changed_plan,
        save_here=save_here and SaveId(*save_here),
        counts_alike=counts_alike,
        took_s=took_s,
    )


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
