"""Ctrl-C anywhere in a save: it takes nothing that the next one needs, such as a lock or memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.ranks import run_script


@pytest.mark.slow
@pytest.mark.parametrize("happens", ["lock", "call"])
@pytest.mark.parametrize("kind", ["sync", "split", "waves", "overlapped", "tier"])
def test_a_save_after_an_interrupted_one_is_committed(
    tmp_path: Path, kind: str, happens: str
) -> None:
    """Wherever the main thread was, and at every second place if Ctrl-C was pressed twice."""
    # The offset of the places is another in each order of the tests, and the same in the same one.
    arguments = kind, happens, str(tmp_path / "save"), str(random.random())
    done = run_script("programs/interrupted_saves.py", *arguments, cwd=tmp_path, timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
