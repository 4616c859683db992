"""The verdict on a save: committed only if each rank wrote exactly what was planned."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall._commit.commit import failures_in, require_all_present, require_one_result_each
from nostall.errors import IncompleteSaveError

OUTCOMES = st.one_of(
    st.lists(st.integers(), max_size=3), st.text(max_size=9).map(lambda text: (OSError(text), None))
)


@given(outcomes=st.lists(OUTCOMES, min_size=1, max_size=8))
def test_a_save_is_committed_only_if_every_rank_wrote_everything(outcomes: list[Any]) -> None:
    """One failed rank aborts the save, and every failed rank is named."""
    failed = {rank: one for rank, one in enumerate(outcomes) if isinstance(one, tuple)}
    assert failures_in(outcomes) == failed


NAMES = st.lists(st.sampled_from("abcdef"), max_size=8)


@given(planned=NAMES, results=NAMES)
def test_results_that_are_not_the_planned_ones_are_refused(
    planned: list[str], results: list[str]
) -> None:
    """An item without a result, with two, or never planned is an error, whatever the order."""
    if sorted(planned) == sorted(results):
        require_one_result_each(planned, results, rank=3)
        return
    with pytest.raises(IncompleteSaveError) as caught:
        require_one_result_each(planned, results, rank=3)
    assert (caught.value.rank, caught.value.phase) == (3, "collect")


def test_the_error_names_items_that_do_not_match() -> None:
    """Which items are missing or too many stands in the message."""
    with pytest.raises(
        IncompleteSaveError, match=r"planned items .*: 1; .* results: 1: .*'lost', 'twice'"
    ):
        require_one_result_each(["a", "lost", "twice"], ["twice", "a", "twice"])


@given(planned=NAMES, results=NAMES)
def test_an_item_that_no_rank_wrote_is_refused(planned: list[str], results: list[str]) -> None:
    """A rank must have written all that the metadata names; nothing else would be found."""
    if set(planned) == set(results):
        require_all_present(planned, results)
        return
    with pytest.raises(IncompleteSaveError) as caught:
        require_all_present(planned, results)
    named = sorted(set(planned) - set(results) or set(results) - set(planned))
    assert str(named[:3]) in str(caught.value)
    assert caught.value.hint
