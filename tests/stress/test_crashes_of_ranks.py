"""A crash at any moment of a save of two ranks, however far each of them has come.

The ranks are real, and so are their operations on storage; the interleavings that the recording
allows, and what a crash may leave of each, are a model's (``crashes_of_ranks``, ``crashes``).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from programs.entry_points import differing
from programs.recording import PLACES, WAYS, share_of
from stress.crashes_of_ranks import Recording, relative
from support.crashes import found_in, rebuild
from support.ranks import run_ranks

Outcomes = dict[tuple[int, int], set[int | None]]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All recordings, one directory each; one start of two ranks for all of them."""
    out = tmp_path_factory.mktemp("recordings")
    run_ranks(2, "recording:everything", out)
    return out


def loaded_from(path: Path) -> int:
    """Which save a resuming job finds in a directory."""
    state: dict[str, Any] = share_of(0, -1) | share_of(1, -1)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    seed: int = state["epoch"]
    assert differing(state, share_of(0, seed) | share_of(1, seed)) == []
    return seed


def outcomes(recording: Recording, root: Path, out: Path) -> tuple[Outcomes, int]:
    """For every moment the saves that a crash may leave; and of how many different states."""
    known: dict[Any, int | None] = {}
    found: Outcomes = {}
    for moment in recording.moments():
        found[moment] = set()
        for disk in recording.disks(moment):
            for left in disk.after_crash():
                key = relative(left, root)
                if key not in known:
                    rebuild(left, root, out / "left")
                    known[key] = found_in(out / "left" / "checkpoint", loaded_from)
                    shutil.rmtree(out / "left")
                found[moment].add(known[key])
    return found, len(known)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_leave_the_old_checkpoint_or_the_new_one(
    recordings: Path, tmp_path: Path, way: str, place: str
) -> None:
    """However far each has come; the new one once both are done, and not before rank 1 is."""
    here = recordings / f"{way}-{place}"
    recording = Recording.read(here)
    assert recording.coordinator_waited
    found, states = outcomes(recording, here / "root", tmp_path)
    print(f"{way}, {place}: {len(found)} moments, {states} states")
    old = 1 if PLACES[place] else None
    assert set().union(*found.values()) == {old, 2}
    assert found[0, 0] == {old}
    assert found[max(found)] == {2}
    assert {old, 2} in found.values()
    is_done = len(recording.ranks[1])
    assert all(each == {old} for (_, second), each in found.items() if second < is_done)


def test_the_model_finds_a_coordinator_that_does_not_wait(recordings: Path, tmp_path: Path) -> None:
    """If it published early, some crash would leave a checkpoint that looks whole and is not."""

    class Hasty(Recording):
        def waits_for(self, rank: int, number: int) -> int:
            return super().waits_for(rank, number) if number < self.publishing else 0

    here = recordings / "split-overwritten"
    with pytest.raises((AssertionError, dcp.api.CheckpointException)):
        outcomes(Hasty.read(here), here / "root", tmp_path)
