"""Every entry point saves what stock DCP saves; names and signatures are as called."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager

from nostall import core, filesystem_async
from nostall.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from nostall.core import AsyncCaller, AsyncRequest
from nostall.errors import OptionError
from nostall.filesystem_async import FileSystemWriterAsync
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
    assert facts == {"same": True, "shared metadata": False, "wrong": []}


@pytest.fixture(scope="module")
def saved_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Findings of ``entry_points.everything`` on each of two ranks."""
    return run_ranks(2, "entry_points:everything", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("route", entry_points.ROUTES)
def test_ranks_save_what_stock_saves(route: str, saved_by_ranks: list[Any]) -> None:
    """DTensors, ShardedTensors, tensors and objects have stock's bytes; stock loads them."""
    for found in saved_by_ranks:
        assert found["routes"][route] == {"same as stock": True, "wrong": []}


def test_ranks_save_with_a_planner_of_the_users_own(saved_by_ranks: list[Any]) -> None:
    """Each item is looked up and transformed once, on the rank that writes it."""
    found = [facts["own planner"] for facts in saved_by_ranks]
    for facts in found:
        assert (facts["save"], facts["split"], facts["transformed"]) == (True, True, True)
    looked_up = [set(facts["looked up"]) for facts in found]
    assert set.union(*looked_up) == set(saved_by_ranks[0]["items"])
    sharded = {"columns", "even", "uneven", "sharded tensor"}
    assert set.intersection(*looked_up) - {"on one rank"} == sharded


def test_ranks_save_without_collectives(saved_by_ranks: list[Any]) -> None:
    """Every rank publishes a checkpoint of its own, in files of its own, and loads it again."""
    for found in saved_by_ranks:
        facts = {"same": True, "shared metadata": False, "wrong": []}
        assert found["without collectives"] == facts


def test_the_slowest_rank_is_named_on_all_ranks(saved_by_ranks: list[Any]) -> None:
    """By the statistics of the rank whose device is slow, and of the other; the first one logs."""
    assert [(found["slowest"], found["lines"]) for found in saved_by_ranks] == [(1, 2), (1, 0)]


# --- names and signatures -------------------------------------------------------------------------

SIGNATURES = """
filesystem_async.FileSystemWriterAsync.__init__(self, path, *args, separation_hint=None,
    use_msc=False, is_multiproc_io=False, use_cached_data_structure=False,
    use_cpu_shm_for_gpu_tensors=False, **kwargs)
filesystem_async.FileSystemWriterAsync.prepare_write_data(self, plan, planner)
filesystem_async.FileSystemWriterAsync.get_save_function_and_args(self)
filesystem_async.FileSystemWriterAsync.retrieve_write_results(self)
filesystem_async.FileSystemWriterAsync.prepare_decentralized_global_plan(self, local_plan)
filesystem_async.FileSystemWriterAsync.cleanup_tensor_caches()
filesystem_async.get_write_results_queue(mp_mode='spawn')
core.AsyncRequest.add_finalize_fn(self, fn)
core.AsyncRequest.execute_sync(self)
core.AsyncRequest.freeze(self)
core.AsyncRequest.execute_finalize_fns(self, validate_matching_call_idx=True)
core.AsyncCaller.schedule_async_call(self, async_req)
core.AsyncCaller.is_current_async_call_done(self, blocking=False, no_dist=False,
    finalize_timeout=None)
core.AsyncCaller.sync_all_async_calls(self, is_alive)
core.AsyncCaller.close(self, abort=False)
core.PersistentAsyncCaller.__init__(self, is_daemon=True, cpu_priority=10, io_priority=None,
    sigterm_timeout=30.0, cpu_shm_mode=False)
core.AsyncCallsQueue.__init__(self, persistent=True, is_daemon=True, cpu_priority=10,
    io_priority=None, sigterm_timeout=30.0, cpu_shm_mode=False)
core.AsyncCallsQueue.warmup_persistent_caller(rank, is_daemon=True, cpu_priority=10,
    io_priority=None, sigterm_timeout=30.0, cpu_shm_mode=False)
core.AsyncCallsQueue.schedule_async_request(self, async_request)
core.AsyncCallsQueue.maybe_finalize_async_calls(self, blocking=False, no_dist=False,
    finalize_timeout=None)
core.AsyncCallsQueue.get_num_unfinalized_calls(self)
core.AsyncCallsQueue.get_instances()
core.AsyncCallsQueue.poll(self)
core.AsyncCallsQueue.wait(self, timeout=None)
core.AsyncCallsQueue.close(self, abort=False)
core.abort_nvrx_checkpoint()
nvrx_alias.install(force=False)
core.abort_all()
state_dict_saver.CheckpointMetadataCache.__init__(self)
state_dict_saver.CheckpointMetadataCache.set_cached_global_metadata(self, cached_global_metadata)
state_dict_saver.CheckpointMetadataCache.set_cache_metadata(self, central_plan, local_plan,
    global_md_verify_reuse)
state_dict_saver.CheckpointMetadataCache.prepare_save_state_dict_ret(self, rank, coordinator,
    save_state_dict_ret)
state_dict_saver.CheckpointMetadataCache.get_cache_metadata(self)
state_dict_saver.CheckpointMetadataCache.get_metadata_caching_status(self)
state_dict_saver.init_checkpoint_metadata_cache(cached_global_metadata=None)
state_dict_saver.get_metadata_caching_status()
state_dict_saver.save_state_dict_async_plan(state_dict, storage_writer, process_group=None,
    coordinator_rank=0, planner=None, enable_cache=False, metadata_cache=None)
state_dict_saver.save_state_dict_async_finalize(storage_writer, global_metadata, dist_wrapper)
state_dict_saver.verify_global_md_reuse(loaded_all_plans, local_plan, rank, dist_wrapper)
torch_ckpt.TorchAsyncCheckpoint.__init__(self, persistent_queue=True)
torch_ckpt.TorchAsyncCheckpoint.async_save(self, state_dict, *args, **kwargs)
torch_ckpt.TorchAsyncCheckpoint.finalize_async_save(self, blocking=False, no_dist=True,
    terminate=False)
torch_ckpt.TorchAsyncCheckpoint.close(self, abort=False)
cached_metadata_filesystem_reader.CachedMetadataFileSystemReader.__init__(self, path,
    cache_metadata=True)
cached_metadata_filesystem_reader.CachedMetadataFileSystemReader.clear_metadata_cache(path=None)
core.AsyncRequest.__new__(_cls, async_fn, async_fn_args, finalize_fns, async_fn_kwargs=None,
    preload_fn=None, is_frozen=False, call_idx=0, flush_dst=None)
"""


def test_signatures_are_those_frameworks_call() -> None:
    """Names, order and defaults of parameters are fixed; more may follow by keyword only."""
    promised = dict(re.findall(r"(\S+?)(\(.*\))\n", SIGNATURES.replace("\n    ", " ")))
    assert len(promised) > 40
    found = {
        name: _promised(pkgutil.resolve_name(f"nostall.{name}"), text)
        for name, text in promised.items()
    }
    assert found == promised


def _promised(function: Callable[..., Any], expected: str) -> str:
    """The signature without annotations and without what may be added to it."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        or parameter.default is inspect.Parameter.empty
        or f"{parameter.name}=" in expected
    ]
    return str(inspect.Signature(parameters))


def test_classes_are_those_that_frameworks_expect() -> None:
    """Requests are tuples, writer and reader stock's; callers are abstract, but for two kinds."""
    assert issubclass(AsyncRequest, tuple)
    assert issubclass(FileSystemWriterAsync, FileSystemWriter)
    assert issubclass(CachedMetadataFileSystemReader, FileSystemReader)
    writer = FileSystemWriterAsync("/nowhere")
    assert isinstance(writer, AsyncStager)
    assert writer.can_run_decentralized_global_plan is True
    assert writer.checkpoint_id == Path("/nowhere")
    assert inspect.isabstract(AsyncCaller)
    for kind in (core.PersistentAsyncCaller, core.TemporalAsyncCaller):
        assert issubclass(kind, AsyncCaller)
        kind().close()
    queue = filesystem_async.get_write_results_queue()
    assert filesystem_async.get_write_results_queue("fork") is queue
    assert filesystem_async._results_queue is queue


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
