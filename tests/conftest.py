"""Shared by all tests: each starts with a fresh engine, and must leave nothing behind."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from nostall import _engine
from nostall.core import AsyncCallsQueue
from support import loaded
from support.fake_accelerator import FakeAccelerator
from support.object_store import SERVERS, S3Server, s3_server
from support.processes import command_of, descendants
from support.ranks import Program, RanksFailed, run_in_turn

LONGEST = {
    *("test_benchmarks.py", "test_early_commit.py", "test_faults.py"),
    *("test_lifecycle.py", "test_resources.py", "test_s3.py"),
}
"""Files that take longest, besides the programs in ``stress``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--s3=swift`` runs the tests of S3 against another server."""
    parser.addoption("--s3", choices=list(SERVERS), default="moto")


def pytest_configure(config: pytest.Config) -> None:
    """Give no property test a deadline: a busy machine must not fail it."""
    if config.pluginmanager.has_plugin("hypothesispytest"):  # frameworks' sessions do without
        settings = importlib.import_module("hypothesis").settings
        settings.register_profile("untimed", deadline=None)
        settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that none is still running when the others have ended."""
    items.sort(key=lambda item: "stress" not in item.path.parts and item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Exempt what importing torch left from the collections after each test, to save time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def imports_are_not_collected() -> None:
    """Exempt what the files before have imported, too: some packages are as large as torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test ends with no process of ours running and the default engine gone."""
    before = descendants()
    yield
    if (promotions := sys.modules.get("nostall._tier.promotions")) is not None:
        promotions.close()
    _engine.reset()
    gc.collect()
    left = {command_of(pid) for pid in descendants() - before}
    # Programs of tests are forks of another process, but have their clients here.
    assert not [each for each in left if "nostall" in each or str(loaded.CLIENT) in each]


@pytest.fixture
def queue() -> Iterator[AsyncCallsQueue]:
    """A queue that is closed at the end; a save that failed unnoticed fails the test."""
    opened = AsyncCallsQueue()
    yield opened
    try:
        opened.close()
    except CheckpointException as error:
        # It is no Exception: pytest would undo nothing else of this test, and fail every later one.
        raise AssertionError(f"a save of this test failed: {error}") from error


@pytest.fixture(scope="module")
def found_in_turn(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Program], list[Any] | RanksFailed]:
    """Runs all programs for one number of ranks that chosen tests of this file ask for, once."""
    here = [item for item in request.session.items if item.path == request.path]
    calls = [
        item.callspec
        for item in here
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    asked = {call.params.get("found") for call in calls}
    programs = sorted(each for each in asked if isinstance(each, Program))

    @cache
    def run(ranks: int) -> dict[Program, list[Any] | RanksFailed]:
        chosen = [each for each in programs if each.ranks == ranks]
        return run_in_turn(chosen, tmp_path_factory.mktemp(f"on-{ranks}-ranks"))

    return lambda program: run(program.ranks)[program]


@pytest.fixture
def found(
    request: pytest.FixtureRequest,
    found_in_turn: Callable[[Program], list[Any] | RanksFailed],
) -> list[Any]:
    """Answers of a program on each rank, see ``support.ranks.on_ranks``."""
    results = found_in_turn(request.param)
    if isinstance(results, RanksFailed):
        raise results
    return results


@pytest.fixture
def given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save whose report never comes is given up in half a second, not in four."""
    monkeypatch.setattr(_engine, "CANCEL_TIMEOUT_S", 0.5)


@pytest.fixture
def one_thread_computes() -> Iterator[None]:
    """Else threads of a computation and of saves spin for each other's processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    """An accelerator that does its work as late as it may."""
    with FakeAccelerator() as made:
        yield made


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """A shell that starts the tests in the background lets them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def started_s3(pytestconfig: pytest.Config) -> Iterator[S3Server]:
    """The S3 server of this session."""
    with s3_server(pytestconfig.getoption("--s3")) as server:
        yield server


@pytest.fixture
def s3(started_s3: S3Server) -> Iterator[S3Server]:
    """An S3 server without faults."""
    yield started_s3
    started_s3.inject()
