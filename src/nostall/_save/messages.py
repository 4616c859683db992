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
from nostall._model.values import RankFiles, SaveId, WrittenFile
from nostall.errors import SaveError


class RankMessage(NamedTuple):
    """Sent by each rank to the coordinator when it finalises.

    The coordinator gets thousands per save. So this and its parts are tuples, and they are sent as
    tuples without a class: frozen dataclasses take three times as long to unpickle.
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
        parts = (
            isinstance(outcome, ResultsReference),
            outcome[:] if isinstance(outcome, ResultsReference) else outcome,
            (
                written.directory,
                None if written.files is None else [each[:] for each in written.files],
                written.left,
                written.belongs_at,
            ),
            self.changed_plan,
            None if save is None else save[:],
            self.counts_alike,
            self.took_s,
        )
        return pickle.dumps(parts)


@no_collection()
def decoded(messages: Sequence[RankMessage | bytes]) -> list[RankMessage]:
    """The messages of all ranks; that of a process that saves alone was not encoded.

    Raises:
        SaveError: One cannot be read.
    """
    found: list[RankMessage] = []
    for rank, each in enumerate(messages):
        try:
            found.append(each if isinstance(each, RankMessage) else _decoded(each))
        except Exception as error:  # a pickle can raise anything
            raise SaveError(
                f"the message of a rank cannot be read: {error!r:.200}",
                rank=rank,
                phase="collect",
                hint="run the same versions of nostall and torch on all ranks",
            ) from error
    return found


def _decoded(message: bytes) -> RankMessage:
    is_reference, outcome, written, changed_plan, save, counts_alike, took_s = pickle.loads(message)
    directory, files, left, belongs_at = written
    # Calls with * would take twice as long, for thousands of ranks.
    if files is not None:
        files = tuple([WrittenFile(name, nbytes, crc32) for name, nbytes, crc32 in files])
    if is_reference:
        token, names = outcome
        outcome = ResultsReference(token, names)
    if save is not None:
        series, number = save
        save = SaveId(series, number)
    written = RankFiles(directory, files, left, belongs_at)
    return RankMessage(outcome, written, changed_plan, save, counts_alike, took_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a save ended; sent by the coordinator to every rank."""

    failures: dict[int, _torch.WrappedException]
    published: bool
    """Whether the metadata is published, or may be; after a failure, too."""
    changed: bool
    """Whether the next save is planned together: a rank's structure changed, or the save failed."""
    series: int | None = None
    """A new one of identities, if ranks may count their saves differently."""
    slowest_rank: int | None = None
