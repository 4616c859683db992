"""A contender in a run, and what is known of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from nostall._bench.contender import Contender
from nostall._bench.results import (
    ContenderReport,
    MemoryFigures,
    SaveSample,
    SlowdownSample,
    Verification,
)


class Named(Protocol):
    """A contender of any kind of run."""

    name: str
    description: str


N = TypeVar("N", bound=Named)


@dataclass(slots=True, kw_only=True)
class AnyEntry(Generic[N]):
    """A contender of any kind of run, and whether it is still in it."""

    contender: N
    unavailable: str | None
    error: str | None = None

    @property
    def stands(self) -> bool:
        """Whether it takes part and has not failed."""
        return self.unavailable is None and self.error is None

    def about(self) -> dict[str, Any]:
        """What every report says of it."""
        return {
            "name": self.contender.name,
            "description": self.contender.description,
            "unavailable": self.unavailable,
            "error": self.error,
        }


@dataclass(slots=True, kw_only=True)
class Entry(AnyEntry[Contender]):
    """Filled in phase by phase; only the session writes to it."""

    saves: list[SaveSample] = field(default_factory=list)
    idle_saves: list[SaveSample] = field(default_factory=list)
    plain_saves: list[SaveSample] = field(default_factory=list)
    memory: MemoryFigures | None = None
    slowdowns: list[SlowdownSample] = field(default_factory=list)
    verification: Verification | None = None

    def has_plain_saves(self, wanted: int) -> bool:
        """Whether as many plain saves as wanted found memory at hand."""
        return len(self.report().warm_plain_saves) >= wanted

    def report(self) -> ContenderReport:
        """All that was found, and will not change any more."""
        return ContenderReport(
            **self.about(),
            saves=tuple(self.saves),
            idle_saves=tuple(self.idle_saves),
            plain_saves=tuple(self.plain_saves),
            memory=self.memory,
            slowdowns=tuple(self.slowdowns),
            verification=self.verification,
        )
