"""What ranks and the coordinator tell each other when a split save ends."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.checkpoint.planner import SavePlan

from nostall import _torch
from nostall._commit.known_results import RankOutcome, ResultsReference
from nostall._model.collection import no_collection
from nostall._model.completion import SaveId
from nostall._model.values import RankFiles, WrittenFile


class RankMessage(NamedTuple):
    """Sent by each rank to the coordinator when it finalises.

    The coordinator gets thousands per save, so this and its parts are tuples, and sent as plain
    ones: frozen dataclasses, pickled as such, take three times as long to arrive.
    """

    outcome: RankOutcome
    written: RankFiles
    changed_plan: SavePlan | None
    save_here: SaveId | None
    """What identifies it among those to its directory; ``None`` if it was not counted."""
    counts_alike: bool
    """Whether all ranks are known to count saves alike."""
    took_s: float
    """From the start of planning until the files were durable."""

    def encoded(self) -> bytes:
        """What is sent; see :func:`decoded`."""
        outcome, written, save = self.outcome, self.written, self.save_here
        plain = (
            isinstance(outcome, ResultsReference),
            outcome[:] if isinstance(outcome, ResultsReference) else outcome,
            (
                written.directory,
                written.files and [each[:] for each in written.files],
                written.left,
                written.belongs_at,
            ),
            self.changed_plan,
            save and save[:],
            self.counts_alike,
            self.took_s,
        )
        return pickle.dumps(plain)


@no_collection()
def decoded(messages: Sequence[bytes]) -> list[RankMessage]:
    """Messages that ranks have sent."""
    return list(map(_decoded, messages))


def _decoded(message: bytes) -> RankMessage:
    is_reference, outcome, written, changed_plan, save_here, *rest = pickle.loads(message)
    directory, files, *others = written
    return RankMessage(
        ResultsReference(*outcome) if is_reference else outcome,
        RankFiles(directory, files and tuple([WrittenFile(*each) for each in files]), *others),
        changed_plan,
        save_here and SaveId(*save_here),
        *rest,
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
