"""Write results that the coordinator has already: equal ones are neither sent nor pickled again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._failures import sendable
from nostall._metadata import Publication
from nostall.errors import SaveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a rank has written."""

    items: list[WriteResult]
    token: str | None
    """Identifies results that may come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameResults:
    """A rank has written what it had told the coordinator before, under this token."""

    token: str


Told = Results | SameResults | _torch.WrappedException
"""How a rank's part of a save has ended, as the rank tells it."""


def tell(
    results: list[WriteResult] | _torch.WrappedException, *, token: str | None, told: str | None
) -> Told:
    """What a rank has to tell, if it told last what ``told`` stands for."""
    if not isinstance(results, list):
        return sendable(results)
    if token is not None and token == told:
        return SameResults(token=token)
    return Results(items=results, token=token)


def token_of(told: Told) -> str | None:
    """What to call these results when they come again."""
    return told.token if isinstance(told, Results | SameResults) else None


class KnownResults:
    """What the coordinator keeps of the last save."""

    def __init__(self) -> None:
        self._of_rank: dict[int, Results] = {}
        self._published: tuple[list[str], dict[str, int], Publication] | None = None
        """What was published last, for which results and which planned metadata."""

    def fill_in(self, told: Sequence[Told]) -> list[list[WriteResult] | _torch.WrappedException]:
        """All ranks' results or failures; those that may come again are kept."""
        everyone: list[list[WriteResult] | _torch.WrappedException] = []
        for rank, each in enumerate(told):
            match each:
                case Results(items=items, token=token):
                    if token is not None:
                        self._of_rank[rank] = each
                    everyone.append(items)
                case SameResults(token=token):
                    everyone.append(self._recall(rank, token))
                case failure:
                    everyone.append(failure)
        return everyone

    def publication(self, told: Sequence[Told], planned: Metadata) -> Publication | None:
        """What was published last, if it was for the same results and the same metadata."""
        if self._published is None:
            return None
        tokens, attributes, publication = self._published
        same = list(map(token_of, told)) == tokens and _attributes(planned) == attributes
        return publication if same else None

    def note_published(
        self, told: Sequence[Told], planned: Metadata, publication: Publication
    ) -> None:
        """Keep what is being published, if all ranks' results may come again."""
        tokens = [token for token in map(token_of, told) if token is not None]
        if len(tokens) == len(told):
            self._published = (tokens, _attributes(planned), publication)

    def _recall(self, rank: int, token: str) -> list[WriteResult] | _torch.WrappedException:
        known = self._of_rank.get(rank)
        if known is not None and known.token == token:
            return known.items
        return _torch.wrap_exception(
            SaveError(
                "this rank refers to results of an earlier save that the coordinator does not have",
                rank=rank,
                phase="collect",
                hint="use one metadata cache per sequence of saves, the same way on all ranks",
            )
        )


def _attributes(metadata: Metadata) -> dict[str, int]:
    """Which objects a planned metadata object consists of; its owner keeps them alive."""
    return {
        name: id(value)
        for name, value in vars(metadata).items()
        if name not in ("storage_data", "storage_meta", "version")
    }
