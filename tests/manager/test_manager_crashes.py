"""Random policies, saves and crashes: no moment has fewer steps than promised.

A crash is storage that refuses every change from a random operation on, as a file system does that
has become read-only. The manager is then given up, and another one, with other policies, goes on.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from nostall import CheckpointManager, KeepBest, KeepEvery, KeepLatest
from nostall._manager.policies import Policy, StepRecord, steps_to_keep
from nostall._manager.steps import StepDirectories
from nostall._storage import posix
from nostall.core import abort_all
from nostall.errors import NostallError
from support.training import Job, disturb, facts

LOSSES = [0.5, 0.2, 0.9, 0.1, 0.7, 0.3, 0.8]
POLICIES = st.lists(
    st.one_of(
        st.builds(KeepLatest, st.integers(1, 3)),
        st.builds(KeepBest, st.integers(1, 2), st.just("loss"), st.sampled_from(["min", "max"])),
        st.builds(KeepEvery, steps=st.integers(2, 4)),
    ),
    max_size=3,
)
LIVES = st.lists(
    st.tuples(
        POLICIES,
        st.lists(st.sampled_from(["save", "save", "again", "wait"]), min_size=1, max_size=5),
        st.integers(1, 60),
    ),
    min_size=2,
    max_size=4,
)


def loss_of(step: int) -> float:
    return LOSSES[step % len(LOSSES)]


class Disk:
    """``os`` for ``_storage.posix``: looks after each change, and refuses them from one on."""

    def __init__(self, root: Path) -> None:
        self._steps = StepDirectories(str(root))
        self._lock = threading.RLock()
        self.left = 0
        """Changes until the crash."""
        self.policies: Sequence[Policy] = ()
        self.ever: set[int] = set()
        """All steps that were there at some moment of this life."""
        self.missing: list[str] = []

    def begin(self, policies: Sequence[Policy], left: int) -> None:
        """A life."""
        self.policies, self.left = policies, left
        self.ever = set(self._steps.committed())

    def look(self) -> None:
        """Whether what is promised is there."""
        there = set(self._steps.committed())
        self.ever |= there
        records = [
            StepRecord(step=step, committed_at_s=0.0, metrics={"loss": loss_of(step)})
            for step in sorted(self.ever)
        ]
        gone = steps_to_keep(records, self.policies) - there
        if gone:
            self.missing.append(f"{sorted(gone)} of {sorted(self.ever)} by {self.policies}")

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in {"replace", "unlink", "rmdir", "mkdir"}:
            return real

        def change(*arguments: Any, **named: Any) -> None:
            with self._lock:
                self.left -= 1
                if self.left < 0:
                    raise OSError(errno.EROFS, "the machine has crashed")
                real(*arguments, **named)
                self.look()

        return change


def live(root: Path, policies: list[Policy], calls: list[str], saved: dict[int, list[Any]]) -> None:
    """One life: restore, and save as told, until the end or the crash.

    ``saved`` has the state of each save of each step, from the one known to be committed on.
    """
    disturb()
    job = Job()
    manager = CheckpointManager(root, keep=policies)
    restored = manager.restore(job.state)
    step = 0 if restored is None else restored.step
    if restored is not None:
        assert restored.metrics == {"loss": loss_of(step)}
        assert facts(job) in saved[step]
        saved[step] = [facts(job)]
    begun: set[int] = set()
    try:
        for call in calls:
            if call == "wait":
                manager.wait()
                # Those of an earlier life may have crashed before their commit.
                saved.update({each: saved[each][-1:] for each in begun})
                continue
            step += call == "save" or not step
            begun.add(step)
            job.train(1)
            saved.setdefault(step, []).append(facts(job))
            manager.save(step, job.state, metrics={"loss": loss_of(step)})
        manager.close()
    except (CheckpointException, NostallError):
        abort_all()
    finally:
        manager._retention.wait(60)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=set(Phase) - {Phase.shrink},  # which takes minutes
)
@given(LIVES)
def test_no_moment_has_fewer_steps_than_promised(
    lives: list[tuple[list[Policy], list[str], int]],
) -> None:
    """After every change of storage; and each life restores the highest step, bit by bit."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "root"
        disk, saved = Disk(root), dict[int, list[Any]]()
        with patch.object(posix, "os", disk):
            for policies, calls, left in lives:
                disk.begin(policies, left)
                live(root, policies, calls, saved)
                assert disk.missing == []
