"""The lifecycle of a request: what the table of transitions allows, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nostall._model.lifecycle import TRANSITIONS, Lifecycle, State
from nostall.errors import (
    IllegalTransitionError,
)

PROGRESS = [
    State.QUEUED,
    State.STAGING,
    State.STAGED,
    State.WRITING,
    State.WRITTEN,
    State.FINALIZED,
]


def in_state(state: State) -> Lifecycle:
    """A request that got to a state by legal steps."""
    request = Lifecycle()
    for step in PROGRESS[1 : PROGRESS.index(state) + 1] if state in PROGRESS else [state]:
        request.to(step)
    assert request.state is state
    return request


def test_a_request_moves_exactly_as_the_table_says() -> None:
    """Of all pairs of states, those in the table are possible; others raise, changing nothing."""
    for present in State:
        for wanted in State:
            request = in_state(present)
            if wanted in TRANSITIONS[present]:
                request.to(wanted)
                assert request.state is wanted
            else:
                with pytest.raises(
                    IllegalTransitionError, match=f"{present.value}.*{wanted.value}"
                ):
                    request.to(wanted)
                assert request.state is present


def test_the_table_is_one_way_forward_and_two_ways_out() -> None:
    """Each unfinished state leads to the next one, failed and aborted; three states are ends."""
    for present, following in pairwise(PROGRESS):
        assert TRANSITIONS[present] == {following, State.FAILED, State.ABORTED}
    for last in (State.FINALIZED, State.FAILED, State.ABORTED):
        assert TRANSITIONS[last] == frozenset()
        assert in_state(last).over
    assert TRANSITIONS.keys() == set(State)
