"""Write results that the coordinator already has: they are not sent or pickled again.

File names may change from save to save; they are sent with each save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from nostall import _torch
from nostall._commit.publication import Publication
from nostall._commit.result_columns import RankResults, ResultColumns
from nostall.errors import SaveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A rank's write results, in full."""

    items: RankResults
    files: tuple[str, ...]
    """Names of the files of the items."""
    token: str | None
    """Identifies results that a later save may refer to."""


class ResultsReference(NamedTuple):
    """A reference to write results that the coordinator received before, under this token."""

    token: str
    files: tuple[str, ...]
    """The present names of the files, in the order of the first report."""


_OF_RESULTS = (Results, ResultsReference)  # made once: there are thousands of ranks
RankOutcome = Results | ResultsReference | _torch.WrappedException
"""A rank's report of its part of a save."""


def token_of(outcome: RankOutcome) -> str | None:
    """The token of these results, if a later save may refer to them."""
    return outcome.token if isinstance(outcome, _OF_RESULTS) else None


def _files_of(outcomes: Sequence[RankOutcome]) -> list[str]:
    return [name for each in outcomes if isinstance(each, _OF_RESULTS) for name in each.files]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """The last publication, with its results and its planned metadata."""

    tokens: list[str]
    attributes: dict[str, Any]
    files: list[str]
    publication: Publication

    def is_of(self, planned: Metadata) -> bool:
        """Whether planned metadata has the same objects; comparing contents costs too much."""
        now = _attributes(planned)
        return now.keys() == self.attributes.keys() and all(
            value is self.attributes[name] for name, value in now.items()
        )


class KnownResults:
    """The coordinator's memory of the last save."""

    def __init__(self) -> None:
        self._of_rank: dict[int, Results] = {}
        self._published: _Published | None = None

    def token(self, rank: int) -> str | None:
        """The token of a rank's results, if they are kept."""
        kept = self._of_rank.get(rank)
        return None if kept is None else kept.token

    def fill_in(
        self, outcomes: Sequence[RankOutcome]
    ) -> list[RankResults | _torch.WrappedException]:
        """All ranks' results or failures; results with a token are kept.

        A reference becomes the kept results, with the earlier file names; see
        :meth:`under_new_names`.
        """
        everyone: list[RankResults | _torch.WrappedException] = []
        before: RankResults | None = None
        for rank, each in enumerate(outcomes):
            match each:
                case ResultsReference(token=token):  # first, as all are in the steady state
                    known = self._of_rank.get(rank)
                    if known is None or known.token != token:
                        everyone.append(_unknown(rank))
                    else:
                        everyone.append(known.items)
                case Results(items=items, token=token):
                    if isinstance(items, ResultColumns):
                        items = before = items.like(before)
                    if token is not None:
                        self._of_rank[rank] = replace(each, items=items)
                    everyone.append(items)
                case failure:
                    everyone.append(failure)
        return everyone

    def under_new_names(
        self, outcomes: Sequence[RankOutcome], results: Sequence[RankResults]
    ) -> list[RankResults]:
        """All ranks' results from :meth:`fill_in`, with the present file names."""
        return [
            _renamed(items, dict(zip(self._of_rank[rank].files, each.files, strict=True)))
            if isinstance(each, ResultsReference)
            else items
            for rank, (each, items) in enumerate(zip(outcomes, results, strict=True))
        ]

    def publication(self, outcomes: Sequence[RankOutcome], planned: Metadata) -> Publication | None:
        """The last publication with new file names, if its results and metadata were the same."""
        last = self._published
        if last is None:
            return None
        if list(map(token_of, outcomes)) != last.tokens or not last.is_of(planned):
            return None
        files = _files_of(outcomes)
        publication = last.publication.renamed(dict(zip(last.files, files, strict=True)))
        if publication is not None:
            self._published = replace(last, files=files, publication=publication)
        return publication

    def note_published(
        self, outcomes: Sequence[RankOutcome], planned: Metadata, publication: Publication
    ) -> None:
        """Keep a publication, if the results of all ranks have a token."""
        tokens = [token for token in map(token_of, outcomes) if token is not None]
        if len(tokens) == len(outcomes):
            self._published = _Published(
                tokens=tokens,
                attributes=_attributes(planned),
                files=_files_of(outcomes),
                publication=publication,
            )


def _unknown(rank: int) -> _torch.WrappedException:
    return _torch.wrap_exception(
        SaveError(
            "this rank refers to results of an earlier save that the coordinator does not have",
            rank=rank,
            phase="collect",
            hint="use one metadata cache per sequence of saves, in the same way on all ranks",
        )
    )


def _renamed(items: RankResults, names: Mapping[str, str]) -> RankResults:
    if isinstance(items, ResultColumns):
        return items.renamed(names)
    return [
        replace(
            item,
            storage_data=replace(
                item.storage_data, relative_path=names[item.storage_data.relative_path]
            ),
        )
        for item in items
    ]


def _attributes(metadata: Metadata) -> dict[str, Any]:
    """The objects of planned metadata, by attribute."""
    return {
        name: value
        for name, value in vars(metadata).items()
        if name not in ("storage_data", "storage_meta", "version")
    }
