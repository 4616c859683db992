"""The life of a save request, as a table.

No I/O and no waiting here. A transition succeeds, or raises
:class:`~nostall.errors.IllegalTransitionError` and changes nothing.
"""

from __future__ import annotations

from enum import Enum

from nostall.errors import IllegalTransitionError


class State(str, Enum):
    """State of a request."""

    QUEUED = "queued"
    STAGING = "staging"
    STAGED = "staged"
    WRITING = "writing"
    WRITTEN = "written"
    FINALIZED = "finalized"
    FAILED = "failed"
    ABORTED = "aborted"


_UNFINISHED = {State.FAILED, State.ABORTED}
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STAGING} | _UNFINISHED),
    State.STAGING: frozenset({State.STAGED} | _UNFINISHED),
    State.STAGED: frozenset({State.WRITING} | _UNFINISHED),
    State.WRITING: frozenset({State.WRITTEN} | _UNFINISHED),
    State.WRITTEN: frozenset({State.FINALIZED} | _UNFINISHED),
    State.FINALIZED: frozenset(),
    State.FAILED: frozenset(),
    State.ABORTED: frozenset(),
}
"""The states that may follow each state. Finalised, failed and aborted are final."""


class Lifecycle:
    """One request's present state."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.QUEUED

    def to(self, wanted: State) -> None:
        """Enter ``wanted``.

        Raises:
            IllegalTransitionError: The table has no such transition; the state is unchanged.
        """
        if wanted not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"a request that is {self.state.value} cannot become {wanted.value}"
            )
        self.state = wanted

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return not TRANSITIONS[self.state]
