"""Errors say what, where and what to do, and survive the way to another process."""

from __future__ import annotations

import builtins
import copy
import pickle
import re
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall import errors
from nostall._model.jobs import RankFailed
from nostall._ranks.failures import error_of, failure_of
from nostall.errors import NostallError, OptionError, SaveError, StagingError, WriteError
from support.states import WAYS

ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
]
PLACE = {"rank": 3, "phase": "write", "path": "/ckpt/__3_0.distcp", "job": "ab12", "hint": "do it"}
OWN = {"errno": 28, "exit_code": -9, "nbytes": 1 << 40}
"""Attributes that only some errors have."""


def example(kind: type[BaseException]) -> BaseException:
    own = {name: value for name, value in OWN.items() if name in vars(kind("x"))}
    if issubclass(kind, WriteError | errors.NotDurableError):
        own["errno"] = OWN["errno"]
    return kind("what went wrong", **PLACE, **own)


def attributes_of(error: BaseException) -> dict[str, Any]:
    names = ("message", "args", *PLACE, *OWN, "note")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def pickled(error: BaseException) -> Any:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("travel", [pickled, copy.copy, copy.deepcopy])
def test_every_error_survives_the_way_to_another_process(
    travel: Callable[[BaseException], BaseException],
) -> None:
    """Type, attributes, notes and text are the same after pickling and after copying."""
    assert len(ERRORS) > 10
    for kind in ERRORS:
        error = example(kind)
        error.note = "kept by whoever caught it"  # type: ignore[attr-defined]  # on purpose
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note("and a note")
        arrived = travel(error)
        assert (type(arrived), str(arrived)) == (kind, str(error))
        assert attributes_of(arrived) == attributes_of(error)
        assert getattr(arrived, "__notes__", None) == getattr(error, "__notes__", None)


def test_every_error_says_what_where_and_what_to_do() -> None:
    """The text has the message, every known place and the hint, whatever the class inherits."""
    for kind in ERRORS:
        assert str(example(kind)) == (
            "what went wrong [rank=3 phase=write path=/ckpt/__3_0.distcp job=ab12] (do it)"
        )
        assert str(kind("alone")) == "alone"


def test_the_documented_tree_is_the_real_one() -> None:
    """The docstring names exactly these classes, each below its bases, built-in ones included."""
    assert errors.__doc__ is not None
    path: list[tuple[int, type]] = []
    named = set()
    for line in errors.__doc__.splitlines():
        found = re.search(r"[A-Z]\w+Error\b", line)
        if found is None or not re.match(r"[\s│├└─]*[A-Z]\w+Error\b", line):
            continue
        kind = getattr(errors, found.group())
        named.add(kind)
        while path and path[-1][0] >= found.start():
            path.pop()
        assert kind.__bases__[0] is (path[-1][1] if path else Exception)
        also = re.findall(r"\(also (\w+)\)", line)
        assert list(kind.__bases__[1:]) == [getattr(builtins, name) for name in also]
        path.append((found.start(), kind))
    assert named == set(ERRORS)


def test_errors_are_caught_as_the_built_in_ones_they_also_are() -> None:
    """Code that knows nothing of nostall catches a full disk as ``OSError`` with its errno."""
    with pytest.raises(OSError) as caught:
        raise WriteError("full", errno=28, path="/x")
    assert caught.value.errno == 28
    assert issubclass(OptionError, ValueError)
    assert issubclass(errors.SaveTimeoutError, TimeoutError)
    assert issubclass(errors.ReservationError, MemoryError)
    assert issubclass(WriteError, SaveError)
    # A directory whose save has failed may be removed; this one may hold a checkpoint.
    assert not issubclass(errors.NotDurableError, SaveError)


@pytest.mark.parametrize("kind", [WriteError, errors.NotDurableError, errors.ReadError])
def test_an_error_of_storage_keeps_its_code_on_the_way_to_other_ranks(
    kind: type[WriteError | errors.NotDurableError | errors.ReadError],
) -> None:
    """Programs decide by it whether to try again."""
    failure = failure_of(kind("refused", errno=5, path="/x"), phase="write")
    arrived = error_of(RankFailed(rank=1, failure=failure))
    assert (type(arrived), getattr(arrived, "errno", None)) == (kind, 5)
    assert (arrived.path, isinstance(arrived, OSError)) == ("/x", True)


def _managed(path: Path, state: dict[str, Any]) -> None:
    with nostall.CheckpointManager(path) as manager:
        manager.save(1, state)
        manager.wait()


@pytest.mark.parametrize("way", ["dcp.save", "dcp.async_save", "split", "manager"])
def test_a_refused_state_is_shown_at_the_users_line(way: str, tmp_path: Path) -> None:
    """No other traceback comes before it, and the last line has the reason."""
    with pytest.raises((CheckpointException, StagingError, OptionError)) as caught:
        {**WAYS, "manager": _managed}[way](tmp_path / "save", {"item": threading.Lock()})
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.index("in test_a_refused_state_is_shown") < shown.index("cannot pickle")
    assert "cannot pickle '_thread.lock' object" in shown.rstrip().splitlines()[-1]
    assert "direct cause" not in shown
    if isinstance(caught.value, NostallError):
        assert isinstance(caught.value.cause, TypeError)
