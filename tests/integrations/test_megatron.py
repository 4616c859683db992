"""Megatron-core saves through nostall, an installed NVRx works beside it: ``nox -s megatron``."""

from __future__ import annotations

import pickle
import re
import sys
from dataclasses import make_dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from support.pages import code_blocks
from support.processes import ended
from support.ranks import run_ranks
from support.states import read_metadata

HAS_MEGATRON = find_spec("megatron") is not None
HAS_NVRX = find_spec("nvidia_resiliency_ext") is not None
HOWS = ["adapter"]
if HAS_MEGATRON and not version("megatron-core").startswith("0.16."):
    HOWS.append("alias")
needs_megatron = pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-core")
needs_nvrx = pytest.mark.skipif(not HAS_NVRX, reason="needs nvidia-resiliency-ext")
Facts = dict[str, Any]


@pytest.fixture(scope="module", params=HOWS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    out = tmp_path_factory.mktemp("megatron")
    return run_ranks(2, "megatron_saves:two_ranks", out, request.param)


@needs_megatron
@pytest.mark.parametrize("caller", ["persistent", "temporal"])
def test_megatron_saves_through_nostall_and_loads_what_it_saved(
    caller: str, found: list[Facts]
) -> None:
    """Tensors, replicas, objects and common values; plans are reused, also after a resume."""
    for facts in found:
        assert facts["writer"]
        said = facts[caller]
        assert said["finalized"] == [0, 1, 2, 3]
        assert said["wrong"] == []
        assert {".metadata", "metadata.json", "__0_0.distcp"} <= set(said["files"])
        (validated, _), (_, loaded) = said["reused"]
        assert (validated, loaded) == (True, True)


@needs_megatron
def test_a_known_structure_is_neither_planned_nor_committed_on_the_training_thread(
    found: list[Facts],
) -> None:
    """Megatron's planner makes no plan; its closure finds the save committed, without a poll."""
    for facts in found:
        assert facts["steady"]["wrong"] == []
        assert set(facts["steady"]["collectives"]) <= {"all_reduce", "barrier"}


@needs_megatron
def test_a_killed_worker_fails_megatrons_save_on_every_rank(found: list[Facts]) -> None:
    """Neither ``.metadata`` nor ``metadata.json`` is written; the next save works."""
    for facts in found:
        said = facts["killed"]
        assert said["failed"] == [1]
        assert set(said["left"]) <= {"common.pt"}
        assert said["wrong"] == []


@needs_megatron
def test_megatrons_training_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    """With ``install(on_error="warn")``; rank 0 says why, once, and the next save is committed.

    A save that blocks training fails on all ranks, as nostall has made it, and the next one works.
    The line of each commit is shown on rank 0, though logging is not configured.
    """
    for rank, facts in enumerate(run_ranks(2, "megatron_saves:options", tmp_path)):
        assert facts["said"].count("No space left") == (rank == 0)
        committed = re.findall(r"nostall: committed: path=\S+/(.*?) rank=0", facts["said"])
        assert committed == (["next", "now", "now", "later"] if rank == 0 else [])
        assert facts["failures"] == 1
        assert facts["finalized"] == [1]
        assert facts["failed"] == [1]
        assert set(facts["left"]) <= {"common.pt"}
        assert facts["wrong"] == []
        assert facts["verl"] == {"queue": True, "noted": ["now", "later"], "wrong": []}


def test_checkpoints_of_megatron_0_15_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their metadata and plans are of Megatron's own classes, which it no longer has."""
    home = ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    extra = [("mcore_data", Any, None)]
    dcp.save({"a": torch.arange(3)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = read_metadata(tmp_path)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "megatron", ModuleType("megatron"))
        patched.setitem(sys.modules, home.__name__, home)
        for name, base in (("MCoreMetadata", Metadata), ("MCoreSavePlan", SavePlan)):
            made: Any = make_dataclass(name, extra, bases=(base,), frozen=base is SavePlan)
            made.__module__ = home.__name__
            setattr(home, name, made)
        theirs = home.MCoreMetadata(**vars(metadata), mcore_data={"a": {"shape": (3,)}})
        theirs.all_local_plans = [home.MCoreSavePlan([], mcore_data={})]
        (tmp_path / ".metadata").write_bytes(pickle.dumps(theirs))
    loaded = {"a": torch.zeros(3, dtype=torch.int64)}
    reader = CachedMetadataFileSystemReader(tmp_path)
    dcp.load(loaded, storage_reader=reader)
    assert loaded["a"].tolist() == [0, 1, 2]
    assert vars(reader.read_metadata())["mcore_data"] == {"a": {"shape": (3,)}}


@needs_megatron
def test_the_documented_loop_runs(tmp_path: Path) -> None:
    """The code of docs/megatron.md, pasted after a sharded state dict, on two ranks."""
    for facts in run_ranks(2, "megatron_saves:documented", tmp_path):
        committed = [f"checkpoints/{step}/metadata.json" for step in (10, 20, 30)]
        assert facts == {"step": 7, "committed": committed}


@pytest.mark.skipif(HAS_NVRX, reason="it is for machines without nvidia-resiliency-ext")
def test_the_documented_nvrx_program_runs(tmp_path: Path) -> None:
    """The code of docs/megatron.md for programs that were written for NVRx."""
    program = tmp_path / "program.py"
    program.write_text(code_blocks("megatron.md")[2])
    ended(sys.executable, "-W", "error", str(program), cwd=tmp_path)
    assert torch.load(tmp_path / "weights.pt")["weight"].tolist() == [1, 1, 1]


@needs_nvrx
def test_local_checkpoints_of_an_installed_nvrx_work_beside_nostall(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Its requests and nostall's go through one queue, with both kinds of callers."""
    for facts in run_ranks(2, "nvrx_local:beside", tmp_path_factory.mktemp("local")):
        assert facts["core"] == "nostall.core"
        for persistent in (True, False):
            said = facts[f"persistent {persistent}"]
            assert said["latest"] == [1, 2]
            assert said["loaded"] == [2, 2]
            assert said["is mine"]
            assert said["complete"] == [f"global {persistent} 1", f"global {persistent} 2"]
