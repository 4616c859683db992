"""Mistakes of users, and the paragraph that each gets: what is wrong, where, and what to do."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat

import nostall
from nostall.core import AsyncCallsQueue
from nostall.errors import NostallError
from support.states import small_state

MODEL = {"model": torch.nn.Linear(4, 4)}


class Mistake(NamedTuple):
    """A mistake, and parts of the message that it gets."""

    make: Callable[[Path], Any]
    """Called with the test's directory."""
    what: str
    where: str
    """An address, or a path in that directory; empty if no place is to blame."""
    hint: str


def save(path: Any, state: dict[str, Any] | None = None, **options: Any) -> Any:
    """Save by DCP's call; the path."""
    writer = nostall.FileSystemWriterAsync(path, **options)
    dcp.save(small_state() if state is None else state, storage_writer=writer)
    return path


def load(path: Path, state: dict[str, Any] | None = None, **options: Any) -> None:
    nostall.load(small_state() if state is None else state, path, **options)


def steps(root: Path) -> Path:
    """A root with two steps."""
    with nostall.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, MODEL)
        manager.wait()
    return root


def file(path: Path, content: bytes = b"notes") -> Path:
    path.write_bytes(content)
    return path


def damaged(path: Path, *, is_cut: bool) -> Path:
    """A checkpoint whose shard file is shorter, or has another byte."""
    (shard,) = save(path).glob("__*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content[: len(content) // 2] if is_cut else content)
    return path


def freed() -> torch.Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def manage(root: Path, **options: Any) -> nostall.CheckpointManager:
    """A manager, closed."""
    with nostall.CheckpointManager(root, **options) as manager:
        return manager


def with_manager(
    root: Path, use: Callable[[nostall.CheckpointManager], Any], **options: Any
) -> None:
    with nostall.CheckpointManager(root, **options) as manager:
        use(manager)


def schedule(request: Any) -> None:
    AsyncCallsQueue().schedule_async_request(request)


OPTIMIZER = torch.optim.AdamW(MODEL["model"].parameters()).state_dict()
SAFETENSORS = {"serialization_format": SerializationFormat.SAFETENSORS}
MISTAKES = {
    "no path": Mistake(lambda _: save(None), "the checkpoint path is None", "", "pass a string"),
    "address as a Path": Mistake(
        lambda _: save(Path("s3://bucket/key")),
        "one of its slashes is lost",
        "s3:/bucket/key",
        "pass addresses as strings",
    ),
    "unknown store": Mistake(
        lambda _: save("hdfs://host/key"),
        "addresses that begin with hdfs:// are not supported",
        "hdfs://host/key",
        "use s3://, gs://, az://",
    ),
    "unknown staging": Mistake(
        lambda at: save(at, staging="async"),
        "invalid staging='async'",
        "",
        "use blocking or overlapped",
    ),
    "options that exclude each other": Mistake(
        lambda at: save(at, thread_count=1, separation_hint="opt"),
        "separation_hint='opt' with thread_count=1",
        "",
        "use thread_count >= 2",
    ),
    "file at the path": Mistake(
        lambda at: save(file(at / "file")),
        "cannot make the checkpoint directory: Not a directory",
        "file",
        "file is a file; remove it or choose another path",
    ),
    "file above the path": Mistake(
        lambda at: save(file(at / "file") / "a"),
        "cannot make the checkpoint directory: Not a directory",
        "file/a",
        "file is a file; remove it or choose another path",
    ),
    "checkpoint at the path": Mistake(
        lambda at: save(save(at / "a"), overwrite=False),
        "Checkpoint already exists",
        "a",
        "choose another directory or pass overwrite=True",
    ),
    "lock in the state": Mistake(
        lambda at: save(at / "a", {"lock": threading.Lock()}),
        "item 'lock' cannot be staged: TypeError: cannot pickle",
        "a",
        "change the item or leave it out",
    ),
    "tensor without memory": Mistake(
        lambda at: save(at / "a", {"freed": freed()}),
        "item 'freed' cannot be staged: ValueError: the tensor takes 4000 bytes",
        "a",
        "change the item or leave it out",
    ),
    "object in safetensors": Mistake(
        lambda at: save(at / "a", {"epoch": 3}, **SAFETENSORS),
        "a safetensors file cannot hold 'epoch' (an object)",
        "",
        "save the others to another checkpoint",
    ),
    "no request": Mistake(
        lambda _: schedule(small_state()),
        "an object of type dict cannot be scheduled: it has no async_fn",
        "",
        "pass an AsyncRequest",
    ),
    "state dict for an object": Mistake(
        lambda at: with_manager(at, lambda one: one.save(1, {"optimizer": OPTIMIZER})),
        "'optimizer' is the state dict of an optimizer",
        "",
        "pass the object itself",
    ),
    "object for a state": Mistake(
        lambda at: with_manager(at, lambda one: one.save(1, MODEL["model"])),  # type: ignore[arg-type]  # the mistake
        "the state is an object of type Linear",
        "",
        'pass a dictionary, such as {"model": model',
    ),
    "negative step": Mistake(
        lambda at: with_manager(at, lambda one: one.save(-1, MODEL)),
        "invalid step=-1",
        "",
        "use an integer of at least 0",
    ),
    "metric that is no number": Mistake(
        lambda at: with_manager(at, lambda one: one.save(1, MODEL, metrics={"loss": "low"})),  # type: ignore[dict-item]  # the mistake
        "could not convert string to float: 'low'",
        "",
        'use {"loss": 0.5}',
    ),
    "class for a policy": Mistake(
        lambda at: manage(at, keep=nostall.KeepLatest),
        "is not a policy",
        "",
        "use KeepLatest(3)",
    ),
    "no interval": Mistake(
        lambda at: manage(at, save_every=0),
        "invalid save_every=0",
        "",
        "use an integer of at least 1",
    ),
    "closed manager": Mistake(
        lambda at: manage(at / "run").save(1, MODEL),
        "the manager is closed",
        "run",
        "make a new CheckpointManager",
    ),
    "step for the root": Mistake(
        lambda at: manage(steps(at) / "step-000000002"),
        "the root is a step itself",
        "step-000000002",
        "pass the directory that holds the steps",
    ),
    "no directory": Mistake(
        lambda at: load(at / "run"),
        "there is no such directory",
        "run",
        "`nostall ls ROOT` lists checkpoints",
    ),
    "options of a store for a directory": Mistake(
        lambda at: load(save(at / "a"), storage_options={"region": "us-east-1"}),
        "storage_options are for s3://, gs:// and az://",
        "a",
        "leave them out",
    ),
    "root of steps for a step": Mistake(
        lambda at: load(steps(at / "run")),
        "checkpoints below it, newest first: step-000000002",
        "run",
        "`nostall ls ROOT` lists checkpoints",
    ),
    "file for a checkpoint": Mistake(
        lambda at: load(file(at / "file")),
        "a file, not the directory of a checkpoint",
        "file",
        "`nostall ls ROOT` lists checkpoints",
    ),
    "another shape": Mistake(
        lambda at: load(save(at / "a"), {"weight": torch.ones(2, 2)}),
        "Size mismatch between saved torch.Size([64, 33]) and current: torch.Size([2, 2])",
        "a",
        "`nostall inspect` lists what a checkpoint has",
    ),
    "name that was not saved": Mistake(
        lambda at: load(save(at / "a"), {"wieght": torch.ones(64, 33)}),
        "Missing key in checkpoint state_dict: wieght; there is weight",
        "a",
        "strict=False leaves out what is missing",
    ),
    "key that the state lacks": Mistake(
        lambda at: load(save(at / "a"), keys=["wieght"]),
        "the state has nothing named wieght",
        "a",
        "names as in `nostall inspect`",
    ),
    "object to load into": Mistake(
        lambda at: load(save(at / "a"), MODEL["model"]),  # type: ignore[arg-type]  # the mistake
        "the state is an object of type Linear",
        "",
        'pass a dictionary, such as {"model": model}',
    ),
    "state for a step": Mistake(
        lambda at: with_manager(at, lambda one: one.save(MODEL, 1)),  # type: ignore[arg-type]  # the mistake
        "invalid step={'model': Linear(",
        "",
        "use an integer of at least 0",
    ),
    "byte changed": Mistake(
        lambda at: load(damaged(at / "a", is_cut=False), verify="crc"),
        "does not match its CRC-32",
        "a/__0_0.distcp",
        "lists all damage; load another checkpoint",
    ),
    "file cut": Mistake(
        lambda at: load(damaged(at / "a", is_cut=True)),
        "its items end at",
        "a/__0_0.distcp",
        "lists all damage; load another checkpoint",
    ),
    "metadata emptied": Mistake(
        lambda at: load(file(save(at / "a") / ".metadata", b"").parent),
        "the metadata cannot be read: EOFError",
        "a/.metadata",
        "`nostall latest ROOT` prints the last complete one",
    ),
    "step that is not there": Mistake(
        lambda at: with_manager(steps(at), lambda one: one.restore(MODEL, step=7)),
        "step 7 is not committed",
        "step-000000007",
        "committed steps: [1, 2]",
    ),
    "another model": Mistake(
        lambda at: with_manager(
            steps(at), lambda one: one.restore({"model": torch.nn.Linear(5, 4)})
        ),
        "the state does not fit step 2: Size mismatch",
        "step-000000002",
        "restore into objects like those that were saved",
    ),
    "metric without a direction": Mistake(
        lambda at: with_manager(at / "run", lambda one: one.best_step("acc")),
        "was not told whether a high or a low metric='acc' is better",
        "run",
        'pass metrics={"acc": "min"}, or "max", to the manager',
    ),
    "read once, alone": Mistake(
        lambda at: load(save(at / "a"), read_once=True),
        "read_once=True needs a process_group",
        "",
        "pass the group of all ranks",
    ),
    "root for a checkpoint to remove": Mistake(
        lambda at: nostall.remove_checkpoint(steps(at / "run")),
        "not a checkpoint",
        "run",
        "nothing was removed",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_paragraph(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names what and where, ends with what to do, and no other traceback comes before it."""
    monkeypatch.chdir(tmp_path)
    mistake = MISTAKES[name]
    with pytest.raises((NostallError, CheckpointException)) as caught:
        mistake.make(tmp_path)
    error: Any = caught.value
    shown = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, CheckpointException):  # torch shows what is inside
        (error, _) = error.failures[0]
    assert isinstance(error, NostallError)
    paragraph = str(error)
    assert shown.endswith(paragraph)
    assert "direct cause" not in shown
    assert "During handling" not in shown
    assert mistake.what in error.message
    assert error.hint is not None
    assert mistake.hint in error.hint
    assert paragraph.endswith(f"({error.hint})")
    where = mistake.where
    place = where if ":/" in where else str(tmp_path / where)
    assert error.path == (place if where else None)
