"""``nostall.load``: what ``dcp.load`` loads, or the part of it that was asked for."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import re
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

import nostall
from nostall._read.planner import LoadPlanner
from nostall.errors import (
    DamagedCheckpointError,
    OptionError,
    ReadError,
    UntrustedMetadataError,
    UntrustedObjectError,
)
from nostall.integrity import State
from support.described import HAS_ATTRIBUTES, part, whole, with_attributes
from support.reads import empty_like, flipped, same, save
from support.states import read_metadata


@dataclass
class Settings:
    """A class that ``weights_only`` does not know."""

    rate: float


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.Linear(300, 400))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def values() -> dict[str, Any]:
    return {
        "weights": {"a": torch.randn(700, 300), "b": torch.arange(6).view(2, 3)},
        "list": [torch.randn(2), 7, {"deep": "text"}],
        "step": 11,
    }


@pytest.mark.parametrize("who", ["nostall", "stock"])
def test_nested_states_are_loaded_in_place(tmp_path: Path, who: str) -> None:
    """Tensors keep their memory, other values are replaced, and all is as ``dcp.load`` does it."""
    saved = values()
    save(tmp_path, saved, who)
    loaded, by_stock = empty_like(saved), empty_like(saved)
    tensor = loaded["weights"]["a"]
    stats = nostall.load(loaded, tmp_path)
    dcp.load(by_stock, checkpoint_id=tmp_path)
    assert loaded["weights"]["a"] is tensor
    assert same(loaded, saved)
    assert same(by_stock, saved)
    assert (stats.items, stats.missing, stats.path) == (6, (), str(tmp_path))


def test_objects_get_their_states(tmp_path: Path) -> None:
    """A model and its optimizer train on as the saved ones."""
    torch.manual_seed(1)
    model, optimizer = training()
    save(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, its_optimizer = training()
    nostall.load({"model": other, "optimizer": its_optimizer}, tmp_path)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(its_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        (["weights"], {"a", "b"}),
        ("weights.b", {"b"}),
        (["weights.a", "step"], {"a", "step"}),
        (["list.2"], {"deep"}),
        (["weights", "weights.a"], {"a", "b"}),
    ],
)
def test_only_the_keys_are_loaded(tmp_path: Path, keys: list[str] | str, changed: set[str]) -> None:
    """Names of items or of what they are in; the rest of the state stays as it is."""
    saved = values()
    loaded, unchanged = empty_like(saved), empty_like(saved)
    save(tmp_path, saved)
    nostall.load(loaded, tmp_path, keys=keys)
    for name in ("a", "b"):
        expected = (saved if name in changed else unchanged)["weights"][name]
        assert torch.equal(loaded["weights"][name], expected)
    assert loaded["step"] == (11 if "step" in changed else None)
    assert loaded["list"][2] == {"deep": "text" if "deep" in changed else None}
    assert loaded["list"][1] is None


@pytest.mark.parametrize(
    "reader", [nostall.FileSystemReader, dcp.FileSystemReader], ids=["ours", "stock"]
)
def test_its_planner_loads_with_stocks_call(
    tmp_path: Path, reader: type[dcp.FileSystemReader]
) -> None:
    """``LoadPlanner`` loads the same as ``nostall.load``, also a second time into another state."""
    saved = values()
    save(tmp_path, saved)
    planner = nostall.LoadPlanner()
    for _ in range(2):
        loaded = empty_like(saved)
        tensor = loaded["weights"]["a"]
        dcp.load(loaded, storage_reader=reader(tmp_path), planner=planner)
        assert loaded["weights"]["a"] is tensor
        assert same(loaded, saved)
    part = {"weights": empty_like(saved)["weights"]}
    dcp.load(part, storage_reader=reader(tmp_path), planner=nostall.LoadPlanner(keys="weights.b"))
    assert torch.equal(part["weights"]["b"], saved["weights"]["b"])
    assert not torch.equal(part["weights"]["a"], saved["weights"]["a"])


def test_what_its_planner_refuses_is_a_typed_error_of_stocks_call(tmp_path: Path) -> None:
    """It refuses as ``nostall.load`` does, and nothing has changed."""
    saved = {**values(), "settings": Settings(0.5)}
    save(tmp_path, saved)
    for planner, state, error in (
        (nostall.LoadPlanner(), {"more": torch.ones(2)}, OptionError),
        (nostall.LoadPlanner(keys="typo"), empty_like(values()), OptionError),
        (nostall.LoadPlanner(), {"step": torch.ones(2)}, OptionError),
        (nostall.LoadPlanner(), {"settings": None}, UntrustedObjectError),
    ):
        before = str(state)
        with pytest.raises(CheckpointException) as caught:
            dcp.load(state, storage_reader=nostall.FileSystemReader(tmp_path), planner=planner)
        (failure,) = caught.value.failures.values()
        assert isinstance(failure[0], error)
        assert str(state) == before
    trusted = {"settings": None}
    reader = nostall.FileSystemReader(tmp_path)
    dcp.load(trusted, storage_reader=reader, planner=nostall.LoadPlanner(trust=True))
    assert trusted == {"settings": Settings(0.5)}


class Elsewhere(nostall.LoadPlanner):
    """A user's own, which loads into other tensors."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.other[index.fqn]

    other: dict[str, torch.Tensor]


def test_a_planner_made_from_it_may_say_where_tensors_are(tmp_path: Path) -> None:
    """Whole tensors, too, which the planner itself does not look up."""
    saved = {"a": torch.randn(5, 3)}
    save(tmp_path, saved)
    planner, state = Elsewhere(), {"a": torch.zeros(5, 3)}
    planner.other = {"a": torch.zeros(5, 3)}
    dcp.load(state, storage_reader=nostall.FileSystemReader(tmp_path), planner=planner)
    assert torch.equal(planner.other["a"], saved["a"])
    assert not state["a"].any()


def test_one_tensor_reads_no_other(tmp_path: Path) -> None:
    """With a shard file that misses everything else: the time is that of what was asked for."""
    save(tmp_path, {"first": torch.ones(5), "second": torch.ones(1 << 20)})
    file = tmp_path / "__0_0.distcp"
    place = nostall.FileSystemReader(tmp_path).read_metadata().storage_data
    end = max(info.offset + info.length for index, info in place.items() if index.fqn == "first")
    os.truncate(file, end)
    loaded = {"first": torch.zeros(5)}
    nostall.load(loaded, tmp_path)
    assert loaded["first"].tolist() == [1.0] * 5


def test_what_is_missing_stays_unless_strict(tmp_path: Path) -> None:
    """New parameters keep their initial values only if the caller allows it."""
    save(tmp_path, {"old": torch.ones(2)})
    state = {"old": torch.zeros(2), "new": torch.full((2,), 5.0)}
    with pytest.raises(OptionError, match="Missing key in checkpoint state_dict: new") as caught:
        nostall.load(state, tmp_path)
    assert caught.value.path == str(tmp_path)
    assert state["old"].tolist() == [0.0, 0.0]
    assert nostall.load(state, tmp_path, strict=False).missing == ("new",)
    assert [state["old"].tolist(), state["new"].tolist()] == [[1.0, 1.0], [5.0, 5.0]]


def test_an_optimizer_without_a_place_for_its_state_is_refused(tmp_path: Path) -> None:
    """It would go on from zero in silence; before its first step it has no state to load into."""
    model, optimizer = training()
    save(tmp_path, {"model": model, "optimizer": optimizer})
    other = torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.Linear(300, 400))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"optimizer\.state\.0\.step.*get_state_dict"):
        nostall.load({"model": other, "optimizer": fresh}, tmp_path)
    with pytest.raises(OptionError, match=r"optimizer\.state\.0\.step"):
        nostall.load({"model": other, "optimizer": fresh.state_dict()}, tmp_path)
    assert fresh.param_groups[0]["lr"] == 0.1
    nostall.load({"model": other, "optimizer": fresh}, tmp_path, keys=["model"])
    nostall.load({"model": other, "optimizer": fresh}, tmp_path, strict=False)
    assert fresh.param_groups[0]["lr"] == 0.5
    assert not fresh.state
    assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_a_state_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """With the names, and both shapes."""
    save(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(1), "c": 1})
    sizes = "saved torch.Size([2, 3]) and current: torch.Size([3, 2]) for a"
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"a": torch.zeros(3, 2)}, {}, re.escape(f"Size mismatch between {sizes}")),
        ({"c": torch.zeros(1)}, {}, "c .a tensor in the state only"),
        ({"a": 1}, {}, "a .a tensor in the checkpoint only"),
        ({}, {"keys": ["weight"]}, "nothing named weight"),
        ({}, {"keys": [1]}, "not a string"),
        ({}, {"read_once": True}, "needs a process_group"),
    ]
    for wrong, options, what in refused:
        state = {"b": torch.zeros(1), **wrong}
        with pytest.raises(OptionError, match=what):
            nostall.load(state, tmp_path, **options)
        assert state["b"].tolist() == [0.0]


class Scaled(torch.Tensor):
    """A tensor of a user's."""


def test_a_tensor_of_an_unknown_class_is_not_taken_for_damaged(tmp_path: Path) -> None:
    """The checkpoint is whole: another one would not help."""
    save(tmp_path, {"weight": torch.arange(4.0).as_subclass(Scaled)})
    state = {"weight": torch.zeros(4)}
    for trust in (False, True):
        with pytest.raises(UntrustedObjectError, match=r"weight.*Scaled.*add_safe_globals"):
            nostall.load(state, tmp_path, trust=trust)
    assert nostall.verify(tmp_path).ok
    with torch.serialization.safe_globals([Scaled]):
        nostall.load(state, tmp_path)
    assert state["weight"].tolist() == [0, 1, 2, 3]


def test_objects_of_unknown_classes_need_trust(tmp_path: Path) -> None:
    """No code of a checkpoint runs unless the caller allows its class, or all."""
    save(tmp_path, {"settings": Settings(0.5)})
    state: dict[str, Any] = {"settings": None}
    with pytest.raises(UntrustedObjectError, match=r"(?s)'settings'.*trust=True"):
        nostall.load(state, tmp_path)
    assert state["settings"] is None
    with torch.serialization.safe_globals([Settings]):
        nostall.load(state, tmp_path)
    assert state["settings"] == Settings(0.5)
    state["settings"] = None
    nostall.load(state, tmp_path, trust=True)
    assert state["settings"] == Settings(0.5)


MODULE = """
class Elsewhere:
    def __setstate__(self, state):
        import tables_of_elsewhere
"""


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda module: sys.modules.pop(module.__name__), ModuleNotFoundError),
        (lambda module: delattr(module, "Elsewhere"), AttributeError),
        (lambda _: None, ModuleNotFoundError),
    ],
    ids=["no module", "no class", "no module that it imports"],
)
def test_what_this_environment_lacks_is_not_damage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[ModuleType], object],
    cause: type[Exception],
) -> None:
    """A class or a module it needs: another checkpoint would not help. A changed byte is damage."""
    module = ModuleType("nostall_elsewhere")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(MODULE, vars(module))
    value = module.Elsewhere()
    value.name = "a"
    save(tmp_path, {"o": {"n": value}})
    change(module)
    shard, state = tmp_path / "__0_0.distcp", {"o": {"n": None}}
    with pytest.raises(ReadError, match=rf"(?s)object 'o\.n'.*path={shard}.*import") as raised:
        nostall.load(state, tmp_path, trust=True)
    assert type(raised.value.__cause__) is cause
    assert nostall.verify(tmp_path).ok
    with (
        flipped(shard, shard.read_bytes().index(b"elsewhere")),
        pytest.raises(DamagedCheckpointError, match=rf"(?s)object 'o\.n'.*path={shard}"),
    ):
        nostall.load(state, tmp_path, trust=True)


class Rebuilt(torch.Tensor):
    """A tensor that needs a module to be made again."""

    def __setstate__(self, state: object) -> None:
        importlib.import_module("nostall_elsewhere")


def test_a_tensor_whose_module_is_missing_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what is missing; a changed byte is damage. Nor is it for ``verify``."""
    save(tmp_path, {"weight": torch.arange(4.0).as_subclass(Rebuilt)}, who="stock")
    shard = tmp_path / "__0_0.distcp"
    state = {"weight": torch.zeros(4)}
    with torch.serialization.safe_globals([Rebuilt]):
        with pytest.raises(
            ReadError, match=rf"(?s)weight.*nostall_elsewhere.*path={shard}.*import"
        ):
            nostall.load(state, tmp_path)
        one = shard.read_bytes().index(struct.pack("<f", 1.0))
        with flipped(shard, one), pytest.raises(DamagedCheckpointError, match="weight"):
            nostall.load(state, tmp_path)
    monkeypatch.setitem(sys.modules, "zipfile", None)
    assert nostall.verify(tmp_path).state is State.UNREADABLE


def test_errors_are_typed_and_name_the_place(tmp_path: Path) -> None:
    """Damaged files, and an item without a file."""
    path, state = tmp_path / "checkpoint", {"a": torch.zeros(1 << 20)}
    save(path, {"a": torch.ones(1 << 20), "o": {"n": (1, 2)}})
    shard, metadata = path / "__0_0.distcp", path / ".metadata"
    with (
        flipped(shard, 1 << 20),
        pytest.raises(DamagedCheckpointError, match=r"(?s)CRC-32.*items a.*__0_0\.distcp"),
    ):
        nostall.load(state, path, verify="crc")
    place = {each.fqn: at for each, at in read_metadata(path).storage_data.items()}["o.n"]
    with (
        flipped(shard, place.offset),
        pytest.raises(DamagedCheckpointError, match=rf"(?s)object 'o\.n'.*path={shard}"),
    ):
        nostall.load({"o": {"n": None}}, path)
    index = metadata.read_bytes().index(b"#nostall-index")
    with flipped(metadata, index), pytest.raises(DamagedCheckpointError):
        nostall.load(state, path)
    path = tmp_path / "stock"
    metadata = path / ".metadata"
    save(path, {"a": torch.ones(3), "b": torch.ones(3)}, who="stock")
    with flipped(metadata, 30), pytest.raises(UntrustedMetadataError):
        nostall.load({"a": torch.zeros(3)}, path)
    placeless = read_metadata(path)
    placeless.storage_data = {i: at for i, at in placeless.storage_data.items() if i.fqn != "a"}
    metadata.write_bytes(pickle.dumps(placeless))
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with pytest.raises(DamagedCheckpointError, match="names no file for a") as raised:
        nostall.load(state, path)
    assert raised.value.path == str(metadata)
    with pytest.raises(CheckpointException, match="names no file for a"):
        dcp.load(state, storage_reader=nostall.FileSystemReader(path), no_dist=True)


def test_a_link_with_dots_behind_it_is_followed_first(tmp_path: Path) -> None:
    """``link/..`` is the parent of the link's target, like in the operating system."""
    for step, parent in ((1, tmp_path / "elsewhere"), (2, tmp_path)):
        save(parent / "step", {"step": step})
    (tmp_path / "elsewhere" / "below").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/below")
    found = {"step": 0}
    nostall.load(found, f"{tmp_path}/link/../step")
    assert found["step"] == 1


def test_a_link_that_is_switched_meanwhile_does_not_mix_two_checkpoints(tmp_path: Path) -> None:
    """The path is followed once: what is read after a switch is still of the same step."""
    for step in (1.0, 2.0):
        save(tmp_path / f"step-{step}", {"m": {"w": torch.full((4,), step)}})
    link = tmp_path / "latest"
    link.symlink_to("step-1.0")

    weight = torch.zeros(4)
    set_up = LoadPlanner.set_up_planner

    def switch(*args: Any, **kwargs: Any) -> None:
        link.unlink()
        link.symlink_to("step-2.0")
        shutil.rmtree(tmp_path / "step-2.0")
        set_up(*args, **kwargs)

    with patch.object(LoadPlanner, "set_up_planner", switch):
        nostall.load({"m": {"w": weight}}, link)
    assert weight.tolist() == [1.0] * 4


def test_a_checkpoint_that_a_rank_saved_alone_is_loaded(tmp_path: Path) -> None:
    """Such a checkpoint has the metadata of each rank, and no other."""
    save(tmp_path, {"w": torch.ones(4)})
    (tmp_path / ".metadata").rename(tmp_path / "__0.metadata")
    state = {"w": torch.zeros(4)}
    with pytest.raises(ReadError):
        nostall.load(state, tmp_path)
    nostall.load(state, tmp_path, use_collectives=False)
    assert state["w"].tolist() == [1.0] * 4


def test_what_is_not_loaded_stays_as_it_is(tmp_path: Path) -> None:
    """Objects of any class, and tensors on the meta device, beside what is selected or missing."""
    save(tmp_path, {"m": {"w": torch.ones(3)}})
    others = {"cfg": Settings(1.0), "set": {1, 2}, "meta": torch.empty(2, device="meta")}
    state: dict[str, Any] = {"m": {"w": torch.zeros(3), **others}}
    nostall.load(state, tmp_path, keys=["m.w"])
    assert state["m"]["w"].tolist() == [1.0] * 3
    assert all(state["m"][name] is each for name, each in others.items())
    assert set(nostall.load(state, tmp_path, strict=False).missing) == {f"m.{n}" for n in others}
    assert all(state["m"][name] is each for name, each in others.items())
    with pytest.raises(OptionError, match=r"Missing key in checkpoint state_dict: m\.cfg"):
        nostall.load(state, tmp_path)
    assert all(state["m"][name] is each for name, each in others.items())


def test_keys_that_are_numbers_are_those_of_the_state(tmp_path: Path) -> None:
    """Integer keys, such as an optimizer's, stay integers, and their values are loaded."""
    save(tmp_path, {"opt": {0: {"step": 5, "x": torch.ones(2)}}, "3": 7})
    state: dict[Any, Any] = {"opt": {0: {"step": 0, "x": torch.zeros(2)}}, 3: 0}
    nostall.load(state, tmp_path)
    assert (state["opt"].keys(), state["opt"][0]["step"]) == ({0}, 5)
    assert (list(state), state[3]) == (["opt", 3], 7)
    state[3] = 0
    nostall.load(state, tmp_path, keys=["3"])
    assert state[3] == 7


@pytest.mark.parametrize(
    "flag", ["trust", "strict", "strict_dtype", "read_once", "use_collectives", "blocking"]
)
def test_flags_are_checked(tmp_path: Path, flag: str) -> None:
    """A text that says no would be taken for true."""
    for wrong in ("no", 0):
        options: dict[str, Any] = {flag: wrong}
        with pytest.raises(OptionError, match=f"invalid {flag}=.*use True or False"):
            nostall.load({}, tmp_path, **options)


def test_a_default_device_does_not_matter(tmp_path: Path) -> None:
    """Memory to read into is that of the CPU; targets are where they are."""
    saved = {"x": torch.ones(400, 300), "none": torch.ones(0, 3), "s": torch.ones(3)}
    save(tmp_path, saved)
    state = {
        "x": torch.zeros(400, 300, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
        "s": torch.zeros(3),
    }
    with torch.device("meta"):
        nostall.load(state, tmp_path)
    assert state["x"].unique().tolist() == state["s"].unique().tolist() == [1.0]


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    """The directory of all checkpoints, which it names, nothing, a file, an unset variable."""
    for step in (9, 10):
        save(tmp_path / f"step-{step}", {"a": torch.ones(2)})
    state = {"a": torch.zeros(2)}
    with pytest.raises(
        ReadError, match="committed here; checkpoints below it, newest first: step-10, step-9 "
    ):
        nostall.load(state, tmp_path)
    (tmp_path / "file").touch()
    for place, why in {
        "": "no checkpoint was committed here",
        "none": "there is no such directory",
        "file": "a file, not the directory of a checkpoint",
        "file/none": f"there is no such directory; {tmp_path}/file is a file",
    }.items():
        path = tmp_path / place
        with pytest.raises(ReadError, match=f"^{why}.*path={path}.*ls ROOT") as caught:
            nostall.load(state, path)
        assert caught.value.__suppress_context__  # the traceback is a short one
        with pytest.raises(OSError, match=f"{why}.*ls ROOT.*{path}"):
            nostall.FileSystemReader(path).read_metadata()
    with pytest.raises(OptionError, match="the checkpoint path is empty"):
        nostall.load(state, "")


SWAPPED = ((4, 0, 4), (0, 4, 4))


@pytest.mark.skipif(not HAS_ATTRIBUTES, reason="torch has these attributes since 2.14")
def test_attributes_say_where_values_go(tmp_path: Path) -> None:
    """A few rows of a larger tensor, with room for more; what is wrong is an error by name."""
    rows = ((3, 1, 5),)
    save(tmp_path, {"t": whole()})
    target = with_attributes(torch.full((6, 6), -1.0), rows)
    nostall.load({"t": target}, tmp_path)
    assert torch.equal(target[1:], whole()[3:])
    assert torch.equal(target[0], torch.full((6,), -1.0))
    target.global_shape = (9, 6)
    with pytest.raises(OptionError, match=r"8, 6.*9, 6"):
        nostall.load({"t": target}, tmp_path)
    target.global_shape, target.local_sizes = (8, 6), ()
    with pytest.raises(OptionError, match=r"t: ValueError: .*must have the same length"):
        nostall.load({"t": target}, tmp_path)


def test_what_a_class_raises_is_an_error_of_the_load(tmp_path: Path) -> None:
    """A class whose description is wrong is named, before anything is read."""
    save(tmp_path, {"t": whole()})
    broken = part(SWAPPED)
    broken.rows = None
    with pytest.raises(OptionError, match=r"t: TypeError: .*NoneType"):
        nostall.load({"t": broken}, tmp_path)


def casts(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [each.getMessage() for each in caplog.records if "casting" in each.getMessage()]
    caplog.clear()
    return said


def test_a_load_says_once_how_many_tensors_are_cast(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At INFO, by whichever call; as a warning if floats become integers."""
    saved = {"a": torch.ones(3), "b": part(SWAPPED), "c": torch.arange(3), "step": 1}
    save(tmp_path / "0", saved)
    half = {"a": torch.zeros(3).half(), "b": torch.zeros(8, 6).half(), "c": torch.zeros(3).long()}
    unchanged = {"a": torch.zeros(3), "b": torch.zeros(8, 6), "c": torch.zeros(3).long(), "step": 0}
    with nostall.CheckpointManager(tmp_path / "managed") as manager:
        manager.save(1, {"t": torch.ones(2), "other": torch.ones(2)})
    caplog.set_level(logging.INFO, logger="nostall")
    nostall.load(half, tmp_path / "0")
    (said,) = casts(caplog)
    assert "casting 2 tensors, torch.float32 to torch.float16: path=" in said
    assert half["b"].float().equal(whole())
    dcp.load(half, storage_reader=nostall.FileSystemReader(tmp_path / "0"), no_dist=True)
    assert casts(caplog) == [said]
    nostall.load(unchanged, tmp_path / "0")
    assert casts(caplog) == []
    state = {"t": torch.zeros(2).bfloat16(), "other": torch.zeros(2)}
    nostall.CheckpointManager(tmp_path / "managed").restore(state)
    (said,) = casts(caplog)
    assert "casting 1 tensor, torch.float32 to torch.bfloat16: path=" in said
    caplog.set_level(logging.WARNING, logger="nostall")
    nostall.load({"a": torch.zeros(3).long()}, tmp_path / "0")
    (said,) = casts(caplog)
    assert "casting 1 tensor, torch.float32 to torch.int64: path=" in said


def test_strict_dtype_refuses_to_cast(tmp_path: Path) -> None:
    """Nothing is loaded, and the tensors are named with both dtypes."""
    save(tmp_path, {"a": torch.ones(3), "b": torch.ones(2)})
    state = {"a": torch.zeros(3).bfloat16(), "b": torch.zeros(2)}
    what = r"loading would cast a from torch\.float32 to torch\.bfloat16"
    with pytest.raises(OptionError, match=what):
        nostall.load(state, tmp_path, strict_dtype=True)
    assert not state["b"].any()
    nostall.load(state, tmp_path, strict_dtype=True, keys=["b"])
    assert state["b"].all()
