"""Which finalize functions are known to do nothing but commit: saves of others wait for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nostall
from nostall._queue.callers import AsyncRequest, committed_by
from nostall.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan

Made = Callable[[Any], Callable[[], Any]]


def by_partial(planned: Any) -> Callable[[], Any]:
    return partial(save_state_dict_async_finalize, *planned)


def by_lambda(planned: Any) -> Callable[[], Any]:
    return lambda: save_state_dict_async_finalize(*planned)


def by_closure(planned: Any, commit: Any = save_state_dict_async_finalize) -> Callable[[], Any]:
    def finalize() -> None:
        """Do nothing but commit, as Megatron's closure."""
        commit(*planned)

    return finalize


def with_a_default(planned: Any) -> Callable[[], Any]:
    def finalize(before: Any = print) -> None:
        before("committing")
        save_state_dict_async_finalize(*planned)

    return finalize


def with_a_builtin(planned: Any) -> Callable[[], Any]:
    def finalize() -> None:
        print("committing")
        save_state_dict_async_finalize(*planned)

    return finalize


def with_another_variable(planned: Any) -> Callable[[], Any]:
    before: Any = print

    def finalize() -> None:
        before("committing")
        save_state_dict_async_finalize(*planned)

    return finalize


def with_a_function_in_it(planned: Any) -> Callable[[], Any]:
    def finalize() -> None:
        (lambda: print("committing"))()  # noqa: PLC3002  # what is tried
        save_state_dict_async_finalize(*planned)

    return finalize


def with_an_import(planned: Any) -> Callable[[], Any]:
    def finalize() -> None:
        import this  # noqa: F401  # what is tried

        save_state_dict_async_finalize(*planned)

    return finalize


def of_several(planned: Any) -> Callable[[], Any]:
    several = [planned, planned, planned]

    def finalize() -> None:
        for each in several:
            save_state_dict_async_finalize(*each)

    return finalize


def without_a_value(planned: Any) -> Callable[[], Any]:
    def finalize() -> None:
        save_state_dict_async_finalize(*later)

    if not planned:
        later = planned
    return finalize


class Committing:
    """An instance that can be called."""

    def __init__(self, planned: Any) -> None:
        self.planned = planned

    def __call__(self) -> None:
        save_state_dict_async_finalize(*self.planned)


@pytest.mark.parametrize("made", [by_partial, by_lambda, by_closure])
def test_what_only_commits_is_known(tmp_path: Path, made: Made) -> None:
    """So no rank has to ask others whether it has raised, and the save is committed without it."""
    assert all(map(committed_by, request_with(made, tmp_path).finalize_fns))


@pytest.mark.parametrize(
    "made",
    [
        with_a_default,
        with_a_builtin,
        with_another_variable,
        with_a_function_in_it,
        with_an_import,
        of_several,
        without_a_value,
        Committing,
    ],
)
def test_of_other_functions_nothing_is_known(tmp_path: Path, made: Made) -> None:
    """They run before the commit."""
    assert not any(map(committed_by, request_with(made, tmp_path).finalize_fns))


def request_with(made: Made, path: Path) -> AsyncRequest:
    """A request of a planned save with such a finalize function."""
    writer = nostall.FileSystemWriterAsync(path / "saved")
    planned = save_state_dict_async_plan({"weight": torch.ones(3)}, writer)
    save_fn, preload_fn, arguments = writer.get_save_function_and_args()
    return AsyncRequest(save_fn, arguments, [made(planned)], {}, preload_fn)
