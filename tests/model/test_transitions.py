"""The state of a save: what the table of transitions allows, and nothing else."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from nostall._model.progress import TRANSITIONS, Progress, SaveState

ON_ITS_WAY = [
    SaveState.PLANNED,
    SaveState.STAGING,
    SaveState.STAGED,
    SaveState.WRITING,
    SaveState.WRITTEN,
    SaveState.COMMITTED,
]
ENDS = {SaveState.COMMITTED, SaveState.FAILED, SaveState.ABORTED}


def in_state(state: SaveState) -> Progress:
    """A save that got to a state by legal steps."""
    save = Progress(path="/checkpoints/1", rank=0)
    for step in ON_ITS_WAY[1 : ON_ITS_WAY.index(state) + 1] if state in ON_ITS_WAY else [state]:
        assert save.to(step)
    assert save.state is state
    return save


@pytest.mark.parametrize("present", SaveState)
@pytest.mark.parametrize("wanted", SaveState)
def test_a_save_moves_exactly_as_the_table_says(present: SaveState, wanted: SaveState) -> None:
    """Pairs of states in the table are legal transitions; all others leave the state unchanged."""
    save = in_state(present)
    is_possible = wanted in TRANSITIONS[present]
    assert save.to(wanted) is is_possible
    assert save.state is (wanted if is_possible else present)


def test_the_table_leads_forward_and_out() -> None:
    """Except that a report which crosses an abort counts: its files are removed."""
    assert TRANSITIONS.keys() == set(SaveState)
    for present, following in pairwise(ON_ITS_WAY):
        assert following in TRANSITIONS[present]
        assert TRANSITIONS[present] & set(ON_ITS_WAY) <= set(
            ON_ITS_WAY[ON_ITS_WAY.index(following) :]
        )
        assert SaveState.FAILED in TRANSITIONS[present]
        assert (SaveState.ABORTED in TRANSITIONS[present]) is (present is not SaveState.WRITTEN)
    for last in ENDS:
        follows = {SaveState.WRITTEN, SaveState.FAILED} if last is SaveState.ABORTED else set()
        assert TRANSITIONS[last] == follows
        assert in_state(last).is_over
        assert in_state(last).status() is None


def test_one_of_several_threads_ends_a_save() -> None:
    """A commit and an abort at the same time: one of them was first, and all see the same."""
    for _ in range(50):
        save, start, won = in_state(SaveState.WRITTEN), threading.Barrier(2), []

        def end(state: SaveState, save: Progress = save, start: threading.Barrier = start) -> None:
            start.wait()
            if save.to(state):
                won.append(state)  # noqa: B023  # joined below, in the same round

        threads = [
            threading.Thread(target=end, args=(each,))
            for each in (SaveState.COMMITTED, SaveState.FAILED)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [save.state]


def test_what_a_writer_reports_late_changes_nothing() -> None:
    """Bytes of a save that is over, or whose files are all written."""
    save = in_state(SaveState.WRITTEN)
    save.wrote("part", 5)
    assert save.state is SaveState.WRITTEN
    status = save.status()
    assert status is not None
    assert status.written_nbytes == status.nbytes
    save.to(SaveState.COMMITTED)
    save.wrote("part", 6)
    assert save.status() is None
