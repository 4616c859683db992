"""Every entry point saves what stock DCP saves; names and signatures are as called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

import nostall
from nostall import (
    cached_metadata_filesystem_reader,
    core,
    errors,
    filesystem_async,
    nvrx_alias,
    options,
    state_dict_saver,
    torch_ckpt,
)
from nostall._memory.staged_state import StagedStateDict
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.core import AsyncCaller, AsyncCallsQueue, AsyncRequest
from nostall.errors import OptionError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import CheckpointMetadataCache
from programs import entry_points
from support.ranks import run_ranks
from support.states import blobs, small_state

# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", entry_points.ALONE)
def test_one_process_saves_what_stock_saves(route: str, tmp_path: Path) -> None:
    """Without a group every entry point writes stock's bytes, and stock loads the call's state."""
    dcp.save(small_state(3), storage_writer=FileSystemWriter(tmp_path / "stock"))
    entry_points.ALONE[route](tmp_path / "ours", small_state(3))
    assert blobs(tmp_path / "ours") == blobs(tmp_path / "stock")
    assert entry_points.loaded_wrong(tmp_path / "ours", small_state(3), small_state(4)) == []


def test_a_difference_would_be_seen(tmp_path: Path) -> None:
    """The comparison that the tests here rest on names exactly what is different."""
    entry_points.save(tmp_path / "ours", small_state(3))
    expected = small_state(3)
    expected["weight"][0, 0] = -0.0
    expected["nested"]["list"][1]["epoch"] = 4
    wrong = entry_points.loaded_wrong(tmp_path / "ours", expected, small_state(3))
    assert wrong == ["/nested/list/1/epoch", "/weight"]


def test_one_process_saves_with_a_planner_of_the_users_own(tmp_path: Path) -> None:
    """Overridden look-ups and transforms count, and a planner may predate ``storage_meta``."""
    entry_points.save(tmp_path / "plain", small_state(3))
    with pytest.warns(UserWarning, match="storage_meta"):  # torch's own, from dcp.save
        facts = entry_points.own_planner(tmp_path, lambda: small_state(3))
    names = sorted({fqn for fqn, _ in blobs(tmp_path / "plain")})
    assert facts == {"save": True, "split": True, "transformed": True, "looked up": names}


def test_one_process_saves_without_collectives(tmp_path: Path) -> None:
    """``use_collectives=False`` publishes metadata under the rank's own name, which stock finds."""
    facts = entry_points.without_collectives(tmp_path, rank=0)
    assert facts == {"same": True, "files": ["__0_0.distcp"], "shared metadata": False, "wrong": []}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def saved_by_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """The directory to which ``entry_points.everything`` saved, and its findings on each rank."""
    out = tmp_path_factory.mktemp("ranks")
    return out, run_ranks(request.param, "entry_points:everything", out)


@pytest.mark.parametrize("route", entry_points.ROUTES)
def test_ranks_save_what_stock_saves(route: str, saved_by_ranks: tuple[Path, list[Any]]) -> None:
    """DTensors of all placements, ShardedTensors, tensors and objects have stock's bytes.

    Stock loads them on every rank as they were at the call.
    """
    for found in saved_by_ranks[1]:
        assert found["routes"][route] == {"same as stock": True, "wrong": []}


def test_ranks_save_with_a_planner_of_the_users_own(
    saved_by_ranks: tuple[Path, list[Any]],
) -> None:
    """Each item is looked up and transformed once, on the rank that writes it."""
    found = [facts["own planner"] for facts in saved_by_ranks[1]]
    for facts in found:
        assert (facts["save"], facts["split"], facts["transformed"]) == (True, True, True)
    if len(found) == 1:
        assert found[0]["looked up"] == saved_by_ranks[1][0]["items"]
    else:
        sharded = {"columns", "even", "uneven", "sharded tensor"}
        looked_up = [set(facts["looked up"]) for facts in found]
        assert set.union(*looked_up) == set(saved_by_ranks[1][0]["items"])
        assert set.intersection(*looked_up) - {"on one rank"} == sharded


def test_ranks_save_without_collectives(saved_by_ranks: tuple[Path, list[Any]]) -> None:
    """Every rank publishes a checkpoint of its own, in files of its own, and loads it again."""
    for rank, found in enumerate(saved_by_ranks[1]):
        assert found["without collectives"] == {
            "same": True,
            "files": [f"__{rank}_0.distcp"],
            "shared metadata": False,
            "wrong": [],
        }


def test_a_sharded_model_comes_back_on_as_many_ranks(
    saved_by_ranks: tuple[Path, list[Any]],
) -> None:
    """An FSDP2 model with AdamW, saved during training, is restored bit for bit on its ranks."""
    for found in saved_by_ranks[1]:
        assert found["fsdp"] == {
            "trained on": True,
            "same as stock": True,
            "wrong": [],
            "sharded": True,
        }


def test_a_sharded_model_comes_back_on_one_process(saved_by_ranks: tuple[Path, list[Any]]) -> None:
    """A sharded model that ranks saved loads into the whole tensors of a lone process."""
    whole = torch.load(saved_by_ranks[0] / "whole.pt")
    template = torch.load(saved_by_ranks[0] / "whole.pt")
    assert len(whole["optimizer"]["state"]) == 4
    path = saved_by_ranks[0] / "checkpoint"
    assert entry_points.loaded_wrong(path, whole, template) == []


# --- names and signatures -------------------------------------------------------------------------

SIGNATURES: dict[str, tuple[Callable[..., Any], str]] = {
    function.__qualname__: (function, expected)
    for function, expected in (
        (
            FileSystemWriterAsync.__init__,
            (
                "(self, path, *args, separation_hint=None, use_msc=False, is_multiproc_io=False,"
                " use_cached_data_structure=False, use_cpu_shm_for_gpu_tensors=False, **kwargs)"
            ),
        ),
        (FileSystemWriterAsync.prepare_write_data, "(self, plan, planner)"),
        (FileSystemWriterAsync.get_save_function_and_args, "(self)"),
        (FileSystemWriterAsync.retrieve_write_results, "(self)"),
        (FileSystemWriterAsync.prepare_decentralized_global_plan, "(self, local_plan)"),
        (FileSystemWriterAsync.write_data, "(self, plan, planner)"),
        (FileSystemWriterAsync.prepare_local_plan, "(self, plan)"),
        (FileSystemWriterAsync.prepare_global_plan, "(self, plans)"),
        (FileSystemWriterAsync.finish, "(self, metadata, results)"),
        (FileSystemWriterAsync.stage, "(self, state_dict)"),
        (FileSystemWriterAsync.synchronize_staging, "(self)"),
        (FileSystemWriterAsync.close, "(self)"),
        (FileSystemWriterAsync.reset, "(self, checkpoint_id=None)"),
        (
            FileSystemWriterAsync.set_up_storage_writer,
            "(self, is_coordinator, *args, **kwargs)",
        ),
        (FileSystemWriterAsync.storage_meta, "(self)"),
        (FileSystemWriterAsync.validate_checkpoint_id, "(checkpoint_id)"),
        (FileSystemWriterAsync.cleanup_tensor_caches, "()"),
        (filesystem_async.get_write_results_queue, "(mp_mode='spawn')"),
        (AsyncRequest.add_finalize_fn, "(self, fn)"),
        (AsyncRequest.execute_sync, "(self)"),
        (AsyncRequest.freeze, "(self)"),
        (AsyncRequest.execute_finalize_fns, "(self, validate_matching_call_idx=True)"),
        (AsyncCaller.schedule_async_call, "(self, async_req)"),
        (AsyncCaller.is_current_async_call_done, "(self, blocking=False, no_dist=False)"),
        (AsyncCaller.sync_all_async_calls, "(self, is_alive)"),
        (AsyncCaller.close, "(self, abort=False)"),
        (
            core.PersistentAsyncCaller.__init__,
            (
                "(self, is_daemon=True, cpu_priority=10, io_priority=None, sigterm_timeout=30.0,"
                " cpu_shm_mode=False)"
            ),
        ),
        (
            AsyncCallsQueue.__init__,
            (
                "(self, persistent=True, is_daemon=True, cpu_priority=10, io_priority=None,"
                " sigterm_timeout=30.0, cpu_shm_mode=False)"
            ),
        ),
        (
            AsyncCallsQueue.warmup_persistent_caller,
            (
                "(rank, is_daemon=True, cpu_priority=10, io_priority=None, sigterm_timeout=30.0,"
                " cpu_shm_mode=False)"
            ),
        ),
        (AsyncCallsQueue.schedule_async_request, "(self, async_request)"),
        (AsyncCallsQueue.maybe_finalize_async_calls, "(self, blocking=False, no_dist=False)"),
        (AsyncCallsQueue.get_num_unfinalized_calls, "(self)"),
        (AsyncCallsQueue.get_instances, "()"),
        (AsyncCallsQueue.poll, "(self)"),
        (AsyncCallsQueue.wait, "(self, timeout=None)"),
        (AsyncCallsQueue.close, "(self, abort=False)"),
        (core.abort_nvrx_checkpoint, "()"),
        (nvrx_alias.install, "(force=False)"),
        (core.abort_all, "()"),
        (CheckpointMetadataCache.__init__, "(self)"),
        (CheckpointMetadataCache.set_cached_global_metadata, "(self, cached_global_metadata)"),
        (
            CheckpointMetadataCache.set_cache_metadata,
            "(self, central_plan, local_plan, global_md_verify_reuse)",
        ),
        (
            CheckpointMetadataCache.prepare_save_state_dict_ret,
            "(self, rank, coordinator, save_state_dict_ret)",
        ),
        (CheckpointMetadataCache.get_cache_metadata, "(self)"),
        (CheckpointMetadataCache.get_metadata_caching_status, "(self)"),
        (state_dict_saver.init_checkpoint_metadata_cache, "(cached_global_metadata=None)"),
        (state_dict_saver.get_metadata_caching_status, "()"),
        (
            state_dict_saver.save_state_dict_async_plan,
            (
                "(state_dict, storage_writer, process_group=None, coordinator_rank=0, planner=None,"
                " enable_cache=False, metadata_cache=None)"
            ),
        ),
        (
            state_dict_saver.save_state_dict_async_finalize,
            "(storage_writer, global_metadata, dist_wrapper)",
        ),
        (
            state_dict_saver.verify_global_md_reuse,
            "(loaded_all_plans, local_plan, rank, dist_wrapper)",
        ),
        (torch_ckpt.TorchAsyncCheckpoint.__init__, "(self, persistent_queue=True)"),
        (torch_ckpt.TorchAsyncCheckpoint.async_save, "(self, state_dict, *args, **kwargs)"),
        (
            torch_ckpt.TorchAsyncCheckpoint.finalize_async_save,
            "(self, blocking=False, no_dist=True, terminate=False)",
        ),
        (torch_ckpt.TorchAsyncCheckpoint.close, "(self, abort=False)"),
        (
            cached_metadata_filesystem_reader.CachedMetadataFileSystemReader.__init__,
            "(self, path, cache_metadata=True)",
        ),
        (
            cached_metadata_filesystem_reader.CachedMetadataFileSystemReader.clear_metadata_cache,
            "(path=None)",
        ),
    )
}


def test_signatures_are_those_frameworks_call() -> None:
    """Names, order and defaults of parameters are fixed; more may follow by keyword only."""
    found = {name: _promised(function, text) for name, (function, text) in SIGNATURES.items()}
    assert found == {name: text for name, (_, text) in SIGNATURES.items()}


def _promised(function: Callable[..., Any], expected: str) -> str:
    """The signature without annotations and without what may be added to it."""
    parameters = inspect.signature(function).parameters.values()
    return str(
        inspect.Signature(
            [
                parameter.replace(annotation=inspect.Parameter.empty)
                for parameter in parameters
                if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
                or parameter.default is inspect.Parameter.empty
                or f"{parameter.name}=" in expected
            ]
        )
    )


def test_a_request_has_the_fields_frameworks_unpack() -> None:
    """``AsyncRequest`` is a tuple of seven fields in a fixed order, four of them with defaults."""
    assert AsyncRequest._fields == (
        "async_fn",
        "async_fn_args",
        "finalize_fns",
        "async_fn_kwargs",
        "preload_fn",
        "is_frozen",
        "call_idx",
    )
    assert AsyncRequest._field_defaults == {
        "async_fn_kwargs": None,
        "preload_fn": None,
        "is_frozen": False,
        "call_idx": 0,
    }
    assert issubclass(AsyncRequest, tuple)


def test_a_caller_is_abstract_and_comes_in_two_kinds() -> None:
    """``AsyncCaller`` cannot be made; the two that can are made with or without arguments."""
    assert inspect.isabstract(AsyncCaller)
    for kind in (core.PersistentAsyncCaller, core.TemporalAsyncCaller):
        assert issubclass(kind, AsyncCaller)
        kind().close()


def test_the_writer_is_a_storage_writer_and_a_stager() -> None:
    """``dcp.async_save`` finds an ``AsyncStager`` in the writer; planners learn its abilities."""
    assert issubclass(FileSystemWriterAsync, FileSystemWriter)
    writer = FileSystemWriterAsync("/nowhere")
    assert isinstance(writer, AsyncStager)
    assert writer.can_run_decentralized_global_plan is True
    assert writer.checkpoint_id == Path("/nowhere")


def test_a_rank_that_plans_alone_gets_files_of_its_own() -> None:
    """The final plan is the local one, with the rank's prefix for its files."""
    writer = FileSystemWriterAsync("/nowhere")
    writer.set_up_storage_writer(False, rank=3)
    planner = DefaultSavePlanner()
    planner.set_up_planner(small_state(1), is_coordinator=False)
    local = planner.create_local_plan()
    final = writer.prepare_decentralized_global_plan(local)
    assert final.items == local.items
    assert final.storage_data.prefix == "__3_"
    assert local.storage_data is None


def test_a_writer_with_nothing_planned_has_nothing_to_schedule() -> None:
    """Before planning, and on a rank with nothing to write, there is no save function."""
    writer = FileSystemWriterAsync("/nowhere")
    assert writer.get_save_function_and_args() == (None, None, [])
    assert writer.retrieve_write_results() == []


@pytest.mark.parametrize("kind", [FileSystemWriterAsync, CachedMetadataFileSystemReader])
def test_an_id_is_valid_if_it_can_be_used(kind: Any) -> None:
    """Paths and addresses that a writer or a reader can be made for; frameworks probe ``msc://``."""
    validate = kind.validate_checkpoint_id
    for valid in ("/some/where", Path("some/where"), "file:///some/where", "s3://some/where"):
        assert validate(valid)
        kind(valid)
    assert validate("s3://bucket/x")
    assert validate("msc://profile/x")
    for invalid in ("nobody://bucket/x", "s3://bucket//x", Path("s3://bucket/x"), "", "a\0b", None):
        assert not validate(invalid)
        with pytest.raises(OptionError):
            kind(invalid)


def test_the_probed_results_queue_is_one_per_process() -> None:
    """Frameworks look for a module attribute and for a function that returns the queue."""
    queue = filesystem_async.get_write_results_queue()
    assert filesystem_async.get_write_results_queue("fork") is queue
    assert filesystem_async._results_queue is queue


def test_the_reader_is_a_file_system_reader() -> None:
    """The caching reader can be used wherever stock's is."""
    reader = cached_metadata_filesystem_reader.CachedMetadataFileSystemReader
    assert issubclass(reader, FileSystemReader)


def test_every_public_name_resolves_to_the_one_in_its_module() -> None:
    """``nostall.X`` is the X of the module that defines it, for all names that are offered."""
    assert set(nostall.__all__) >= {
        "AsyncCallsQueue",
        "AsyncRequest",
        "CachedMetadataFileSystemReader",
        "FileSystemWriterAsync",
        "TorchAsyncCheckpoint",
        "abort_all",
        "save_state_dict_async_finalize",
        "save_state_dict_async_plan",
    }
    assert set(nostall.__all__) <= set(dir(nostall))
    for name in nostall.__all__:
        assert getattr(nostall, name) is not None
    assert nostall.FileSystemWriterAsync is FileSystemWriterAsync
    assert nostall.AsyncCallsQueue is AsyncCallsQueue
    assert nostall.errors is errors
    assert nostall.options is options
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = nostall.no_such_name  # type: ignore[attr-defined]  # on purpose


def test_what_is_staged_is_a_private_copy(tmp_path: Path) -> None:
    """The stager's copy shares no memory with the state, and the writer can be reset."""
    writer = FileSystemWriterAsync(tmp_path / "one")
    state = small_state(3)
    staged = writer.stage(state)
    assert isinstance(staged, StagedStateDict)
    entry_points.spoil(state)
    assert entry_points.differing(small_state(3), staged) == []
    writer.synchronize_staging()
    writer.close()
    writer.reset(tmp_path / "two")
    dcp.save(small_state(5), storage_writer=writer)
    assert entry_points.loaded_wrong(tmp_path / "two", small_state(5), small_state(6)) == []
    assert not (tmp_path / "one").exists()


def test_a_snapshot_that_could_not_be_taken_fails_one_save_only(tmp_path: Path) -> None:
    """With several ranks the save fails, not the call; the writer's next save is not affected."""
    writer, path = FileSystemWriterAsync(tmp_path), tmp_path
    no_memory = errors.ReservationError("no memory today", nbytes=1)
    with (
        patch.object(filesystem_async, "SingleProcess", return_value=Mock(rank=0, world_size=2)),
        patch("nostall._save.stager._copy", side_effect=no_memory),
    ):
        saving: Any = dcp.async_save(
            small_state(1), checkpoint_id=path, storage_writer=writer, no_dist=True
        )
        with pytest.raises(CheckpointException, match="no memory today"):
            saving.result(60)
    dcp.save(small_state(2), checkpoint_id=path, storage_writer=writer, no_dist=True)
    assert entry_points.loaded_wrong(path, small_state(2), small_state(3)) == []
