"""Which finalize functions are known to do nothing but commit: saves of others wait for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nostall
from nostall._queue.callers import committed_by
from nostall.state_dict_saver import save_state_dict_async_finalize as commit
from nostall.state_dict_saver import save_state_dict_async_plan

Finalize = Callable[[], Any]


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    writer = nostall.FileSystemWriterAsync(tmp_path / "saved")
    return save_state_dict_async_plan({"weight": torch.ones(3)}, writer)


def closure(planned: Any, commit: Any = commit) -> Finalize:
    def finalize() -> None:
        """Do nothing but commit, as Megatron's closure."""
        commit(*planned)

    return finalize


@pytest.mark.parametrize(
    "made",
    [lambda planned: partial(commit, *planned), lambda planned: lambda: commit(*planned), closure],
    ids=["partial", "lambda", "closure"],
)
def test_what_only_commits_is_known(planned: Any, made: Callable[[Any], Finalize]) -> None:
    """So no rank has to ask others whether it has raised, and the save is committed without it."""
    assert committed_by(made(planned))


def without_a_value(planned: Any) -> Finalize:
    def finalize() -> None:
        commit(*later)

    if not planned:
        later = planned
    return finalize


class Committing:
    """An instance that can be called."""

    def __init__(self, planned: Any) -> None:
        self.planned = planned

    def __call__(self) -> None:
        commit(*self.planned)


UNKNOWN: dict[str, Any] = {
    "a default": lambda planned: lambda before=print: (before(), commit(*planned)),
    "a builtin": lambda planned: lambda: (print(), commit(*planned)),
    "another variable": lambda planned, before=print: lambda: (before(), commit(*planned)),
    "a function in it": lambda planned: lambda: ((lambda: 0)(), commit(*planned)),  # noqa: PLC3002  # what is tried
    "several": lambda planned: (lambda all_of_it: lambda: commit(*all_of_it[1]))([planned] * 3),  # noqa: PLC3002  # as above
    "no value yet": without_a_value,
    "an instance": Committing,
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_of_other_functions_nothing_is_known(planned: Any, kind: str) -> None:
    """They run before the commit."""
    assert not committed_by(UNKNOWN[kind](planned))
