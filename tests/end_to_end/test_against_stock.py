"""A comparison: the same faults for stock's ``FileSystemWriter`` and nostall's, and one oracle.

    python -m pytest tests/end_to_end/test_against_stock.py -v -p no:randomly

The tests of stock say what it does today: one that fails tells that stock has changed, and that
what ``docs/reliability.md`` says of it is to be looked at. What was done to the writers is in
``programs/against_stock.py``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.ranks import run_ranks, run_script

Aftermath = dict[str, Any]
Found = dict[str, dict[str, list[Aftermath]]]

FRESH = "one file of four fails"
FAULTS = [
    FRESH,
    "one file of four fails while overwriting",
    "the only file fails while overwriting",
    "killed at every step of overwriting",
    "overwritten with fewer threads",
    "changed after async_save",
    "the second rank cannot open a file while overwriting",
]
IN_A_NEW_DIRECTORY = {FRESH, "changed after async_save"}


def broken_promises(after: Aftermath, *, before: str) -> set[str]:
    """The oracle: which of a save's promises do not hold.

    A save that returns has replaced what was there, with nothing left over; one that raises has
    changed nothing that is loaded; one that is killed has done either of the two.
    """
    expected = {"returned": {"new"}, "raised": {before}, "killed": {before, "new"}}[after["ended"]]
    broken = set()
    if after["found"] not in expected:
        if after["ended"] == "returned":
            broken.add("a failure is reported as a success")
        broken.add(
            {
                "mixture": "two checkpoints are mixed and load without an error",
                "unreadable": "what looks like a checkpoint does not load",
                "none": "the old checkpoint is gone, and the new one is not there",
            }.get(after["found"], "another checkpoint than expected is there")
        )
    if after["ended"] == "returned" and after["dead"]:
        broken.add("files that nothing refers to stay")
    return broken


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The aftermath of every fault, by writer and fault."""
    out = tmp_path_factory.mktemp("against stock")
    program = ("programs/against_stock.py", str(out / "one process"))
    done = run_script(*program, cwd=out, timeout_s=100)
    assert done.returncode == 0, done.stderr
    results: Found = json.loads(done.stdout)
    for facts in run_ranks(2, "against_stock:second_rank_cannot_open", out / "two ranks"):
        for writer, after in facts.items():
            results[writer].setdefault(FAULTS[-1], []).append(after)
    return results


def broken_by(found: Found, writer: str, fault: str) -> list[set[str]]:
    """The promises broken each time, on each rank."""
    before = "none" if fault in IN_A_NEW_DIRECTORY else "old"
    return [broken_promises(after, before=before) for after in found[writer][fault]]


@pytest.mark.parametrize("fault", FAULTS)
def test_nostall_keeps_every_promise(found: Found, fault: str) -> None:
    """The old checkpoint or the new one is there, and a caller that lost a save gets an error."""
    broken = broken_by(found, "nostall", fault)
    assert broken == [set()] * len(broken)


def test_stock_reports_success_for_a_write_that_failed(found: Found) -> None:
    """The exception of a background thread is lost, and metadata without its items is published.

    With several threads; see `pytorch#191391 <https://github.com/pytorch/pytorch/issues/191391>`_.
    """
    assert {
        "a failure is reported as a success",
        "what looks like a checkpoint does not load",
    } in [
        broken - {"files that nothing refers to stay"}
        for broken in broken_by(found, "stock", FRESH)
    ]


def test_stock_loses_the_old_checkpoint_and_reports_success(found: Found) -> None:
    """A failed overwrite reports success and leaves metadata that does not load."""
    broken = broken_by(found, "stock", "one file of four fails while overwriting")
    assert any("a failure is reported as a success" in each for each in broken)
    assert all("what looks like a checkpoint does not load" in each for each in broken)


def test_stock_tears_the_old_checkpoint_when_overwriting_fails(found: Found) -> None:
    """With one thread the caller gets an error, but the old metadata then names new files."""
    broken = broken_by(found, "stock", "the only file fails while overwriting")
    assert broken == [{"what looks like a checkpoint does not load"}] * len(broken)


def test_stock_mixes_two_checkpoints_when_one_rank_cannot_write(found: Found) -> None:
    """Both ranks raise, but a job that resumes later mixes new and old values without an error."""
    assert [after["ended"] for after in found["stock"][FAULTS[-1]]] == ["raised", "raised"]
    broken = broken_by(found, "stock", FAULTS[-1])
    assert broken == [{"two checkpoints are mixed and load without an error"}] * 2


def test_stock_mixes_two_checkpoints_when_it_is_killed(found: Found) -> None:
    """Between the first file and the last, if there are several."""
    broken = broken_by(found, "stock", "killed at every step of overwriting")
    assert {"two checkpoints are mixed and load without an error"} in broken


def test_stock_killed_at_the_last_step_leaves_no_checkpoint(found: Found) -> None:
    """The old metadata is removed before the new one gets its name."""
    *_, killed, _ = broken_by(found, "stock", "killed at every step of overwriting")
    assert killed == {"the old checkpoint is gone, and the new one is not there"}


def test_stock_leaves_files_that_nothing_refers_to(found: Found) -> None:
    """An overwrite with fewer threads leaves the old checkpoint's extra files in the directory."""
    (broken,) = broken_by(found, "stock", "overwritten with fewer threads")
    assert broken == {"files that nothing refers to stay"}


def test_stock_copies_before_async_save_returns(found: Found) -> None:
    """Tensors on the CPU and objects, as nostall does: here the two are alike."""
    assert broken_by(found, "stock", "changed after async_save") == [set()]


def test_every_kill_was_one(found: Found) -> None:
    """There was a handful of moments to be killed at, and the save after the last one is done."""
    for writer in ("nostall", "stock"):
        ends = [each["ended"] for each in found[writer]["killed at every step of overwriting"]]
        assert len(ends) > 5
        assert ends == ["killed"] * (len(ends) - 1) + ["returned"]
