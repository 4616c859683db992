"""Frozen items in an object store: the store copies the file of the last save."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._engine import Engine
from nostall._save import split_save, stage
from nostall._storage.objects import s3 as s3_objects
from nostall._storage.objects.s3 import S3Client
from nostall._storage.places import storage_at
from nostall.core import AsyncCallsQueue
from nostall.errors import ReservationError, WriteError
from nostall.testing import Fault, inject
from save.test_frozen import FROZEN, Saver, SplitSaver, State, lora_state, train, zeros_like
from support.object_store import S3Server
from support.states import schedule
from support.waiting import wait_until


@pytest.fixture(params=[Saver, SplitSaver], ids=["dcp.save", "split"])
def save(request: pytest.FixtureRequest) -> Saver:
    """A way to save."""
    saver: Saver = request.param()
    return saver


@pytest.fixture(name="root")
def _root(s3: S3Server) -> str:
    return f"s3://{s3.new_bucket()}/run"


def assert_holds(address: str, state: State, adapter: torch.Tensor) -> None:
    """It is loaded bitwise, and every byte is as it was written."""
    found = zeros_like(state)
    nostall.load(found, address)
    assert torch.equal(found["model"]["base"]["w"], state["model"]["base"]["w"])
    assert torch.equal(found["model"]["adapter"]["a"], adapter)
    assert nostall.verify(address).ok


def copies(s3: S3Server) -> list[str]:
    """Keys of objects that the store was asked to copy something into since the last call."""
    return [each.split()[1] for each in s3.requests() if each.startswith("COPY")]


def test_a_frozen_file_is_copied_by_the_store(s3: S3Server, root: str, save: Saver) -> None:
    """While it is unchanged; every checkpoint is complete by itself."""
    state, adapters = lora_state(), []
    copied = []
    s3.requests()
    for step in range(3):
        save(f"{root}/step-{step}", state)
        copied.append(copies(s3))
        adapters.append(state["model"]["adapter"]["a"].clone())
        train(state)
    assert [len(each) for each in copied] == [0, 1, 1]
    assert "/step-2/frozen__0_" in copied[2][0]
    nostall.remove_checkpoint(f"{root}/step-0")
    nostall.remove_checkpoint(f"{root}/step-1")
    assert_holds(f"{root}/step-2", state, adapters[2])
    state["model"]["base"]["w"].add_(1)
    save(f"{root}/step-3", state)
    assert copies(s3) == []
    assert_holds(f"{root}/step-3", state, state["model"]["adapter"]["a"])


def test_a_large_file_is_copied_in_parts(s3: S3Server, root: str) -> None:
    """Several at a time; the upload is completed."""
    state = lora_state()
    state["model"]["base"]["w"] = torch.randn(3_000_000)
    saver = Saver()
    saver(f"{root}/one", state)
    s3.requests()
    with patch.object(s3_objects, "_COPIED_AT_A_TIME", 5 << 20):
        saver(f"{root}/two", state)
    assert len(copies(s3)) == 3
    assert_holds(f"{root}/two", state, state["model"]["adapter"]["a"])
    assert s3.unfinished(root.split("/")[2]) == []


@pytest.mark.parametrize("nbytes", [1 << 30, 1 << 20], ids=["whole", "in parts"])
def test_a_store_that_does_not_copy_is_written_to(
    s3: S3Server, root: str, save: Saver, nbytes: int
) -> None:
    """The save that finds out fails; the next one sends everything."""
    state = lora_state()
    save(f"{root}/one", state)
    s3.inject(
        {"method": "COPY", "times": 100, "do": "answer", "status": 501, "code": "NotImplemented"}
    )
    with (
        patch.object(s3_objects, "_COPIED_AT_A_TIME", nbytes),
        pytest.raises(CheckpointException) as caught,
    ):
        save(f"{root}/two", state)
    (error,) = (each for each, _ in caught.value.failures.values())
    assert isinstance(error, WriteError)
    assert error.errno == errno.ENOTSUP
    assert error.path is not None
    assert error.path.startswith(f"{root}/one/frozen__0_")
    assert nostall.latest_complete(root) == f"{root}/one"
    assert s3.unfinished(root.split("/")[2]) == []
    save(f"{root}/two", state)
    assert_holds(f"{root}/two", state, state["model"]["adapter"]["a"])
    nostall.remove_checkpoint(f"{root}/one")
    assert_holds(f"{root}/two", state, state["model"]["adapter"]["a"])


def test_a_file_that_is_gone_is_written_again(s3: S3Server, root: str, save: Saver) -> None:
    """It is looked at before the snapshot is taken."""
    state = lora_state()
    save(f"{root}/one", state)
    nostall.remove_checkpoint(f"{root}/one")
    s3.requests()
    save(f"{root}/two", state)
    assert copies(s3) == []
    assert_holds(f"{root}/two", state, state["model"]["adapter"]["a"])


def test_a_store_that_is_busy_is_asked_again(s3: S3Server, root: str, save: Saver) -> None:
    """As in any other request."""
    state = lora_state()
    save(f"{root}/one", state)
    s3.inject({"method": "COPY", "times": 2, "do": "answer", "status": 503, "code": "SlowDown"})
    save(f"{root}/two", state)
    assert_holds(f"{root}/two", state, state["model"]["adapter"]["a"])


@contextmanager
def slow_copies() -> Iterator[Callable[[], None]]:
    """Copies that stand still; the function lets them go on, and waits until they have ended."""
    began, go_on = threading.Event(), threading.Event()
    ended: list[threading.Event] = []
    copy = S3Client.copy

    def slowly(*arguments: Any, **named: Any) -> None:
        ended.append(threading.Event())
        began.set()
        try:
            assert go_on.wait(60)
            copy(*arguments, **named)
        finally:
            ended[-1].set()

    def go() -> None:
        assert began.wait(60)
        go_on.set()
        assert all(each.wait(60) for each in ended)

    with patch.object(S3Client, "copy", slowly):
        yield go


def aborted(address: str, state: State) -> None:
    queue = AsyncCallsQueue()
    schedule(queue, address, state, frozen=FROZEN)
    queue.close(abort=True)


def interrupted_while_scheduling(address: str, state: State) -> None:
    with (
        patch.object(split_save, "without_sources", side_effect=KeyboardInterrupt),
        AsyncCallsQueue() as queue,
        pytest.raises(KeyboardInterrupt),
    ):
        schedule(queue, address, state, frozen=FROZEN)


def failed_in_the_snapshot(address: str, state: State) -> None:
    with (
        patch.object(stage, "begin_snapshot", side_effect=RuntimeError("device lost")),
        pytest.raises(CheckpointException, match="device lost"),
    ):
        SplitSaver(staging="overlapped")(address, state)


def failed_in_a_direct_write(address: str, state: State) -> None:
    with (
        patch.object(Engine, "lease", side_effect=ReservationError("no memory")),
        pytest.raises(CheckpointException, match="no memory"),
    ):
        Saver()(address, state)


@pytest.mark.parametrize(
    "fails",
    [aborted, interrupted_while_scheduling, failed_in_the_snapshot, failed_in_a_direct_write],
)
def test_a_copy_that_arrives_late_harms_nothing(
    root: str, fails: Callable[[str, State], None]
) -> None:
    """The save to the same address that came after the failed one stays whole; the copy goes."""
    state = lora_state()
    Saver()(f"{root}/one", state)
    with slow_copies() as go:
        fails(f"{root}/two", state)
        state["model"]["base"]["w"].add_(1)
        Saver()(f"{root}/two", state)
        expected = sorted(storage_at(f"{root}/two").list())
        go()
    assert len(expected) == 3
    wait_until(lambda: sorted(storage_at(f"{root}/two").list()) == expected)
    assert_holds(f"{root}/two", state, state["model"]["adapter"]["a"])


def test_copies_stop_when_the_write_fails(s3: S3Server, root: str) -> None:
    """The store is asked for no further part, and nothing is left."""
    state = lora_state()
    state["model"]["base"]["w"] = torch.randn(3_000_000)
    saver = SplitSaver()
    saver(f"{root}/one", state)
    s3.requests()
    stopped = threading.Event()
    stop, call = Engine.stop_threads, S3Client._call

    def noticed(engine: Engine, job: str) -> None:
        stop(engine, job)
        stopped.set()

    def slowly(client: S3Client, operation: str, *arguments: Any, **named: Any) -> dict[str, Any]:
        if operation == "upload_part_copy":
            assert stopped.wait(60)
        return call(client, operation, *arguments, **named)

    with (
        patch.object(s3_objects, "_COPIED_AT_A_TIME", 5 << 20),
        patch.object(s3_objects, "_COPIES", 1),
        patch.object(Engine, "stop_threads", noticed),
        patch.object(S3Client, "_call", slowly),
        inject(Fault.errno("chunk", errno.ENOSPC)),
        pytest.raises(CheckpointException, match="No space left"),
    ):
        saver(f"{root}/two", state)
    assert len(copies(s3)) == 1
    assert storage_at(f"{root}/two").list() == []
    assert s3.unfinished(root.split("/")[2]) == []


def test_a_file_that_is_removed_while_it_is_copied_fails_one_save(s3: S3Server, root: str) -> None:
    """The error says so, and the store goes on copying for later saves."""
    state, saver = lora_state(), Saver()
    saver(f"{root}/one", state)
    copy = S3Client.copy

    def too_late(*arguments: Any, **named: Any) -> None:
        nostall.remove_checkpoint(f"{root}/one")
        copy(*arguments, **named)

    with (
        patch.object(S3Client, "copy", too_late),
        pytest.raises(CheckpointException, match="was removed while the store copied it"),
    ):
        saver(f"{root}/two", state)
    saver(f"{root}/two", state)
    s3.requests()
    saver(f"{root}/three", state)
    assert len(copies(s3)) == 1
    assert_holds(f"{root}/three", state, state["model"]["adapter"]["a"])
