"""Two saves, a deadline, a retry or a setting never reach into a checkpoint not theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import nostall
from nostall._engine import default_engine, reset
from nostall.core import AsyncCaller, AsyncCallsQueue
from nostall.errors import OptionError, StagingError, WriterDiedError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nostall.torch_ckpt import TorchAsyncCheckpoint
from support.faults import Hold, inject
from support.parts import Halving
from support.states import (
    blobs,
    blobs_by_stock,
    planned,
    save_in_background,
    save_now,
    schedule,
    small_state,
)


@pytest.mark.usefixtures("given_up_soon")
def test_a_save_given_up_at_its_deadline_never_touches_the_next_ones_memory(tmp_path: Path) -> None:
    """The late job's seals would land in the image of the memory's next holder."""
    nostall.configure(EngineOptions(save_timeout_s=1.0))
    zeros = {"zeros": torch.zeros(200_000), "n": torch.zeros(3)}
    late = {"many": torch.ones(200_000), "n": torch.ones(3)}
    with (
        Hold() as hold,
        inject(hold.fault),
        pytest.raises(CheckpointException, match="not written within"),
    ):
        save_in_background(tmp_path / "late", late)
    save_in_background(tmp_path / "next", zeros)
    assert blobs(tmp_path / "next") == blobs_by_stock(tmp_path / "stock", zeros)
    assert not (tmp_path / "late" / ".metadata").exists()


class Narrowing(DefaultSavePlanner):
    """Saves every second column of each tensor."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: Any = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # DCP's
    ) -> None:
        narrow = {name: tensor[:, ::2] for name, tensor in state_dict.items()}
        super().set_up_planner(narrow, storage_meta, is_coordinator)


@pytest.mark.parametrize("planner", [Halving, Narrowing])
def test_a_planners_own_values_do_not_lie_where_tensors_were_staged(
    tmp_path: Path, planner: type[DefaultSavePlanner]
) -> None:
    """Neither values of other lengths nor a view with gaps, which begins at its tensor's place."""
    state = {f"w{n}": torch.arange(6400.0).reshape(80, 80) + n for n in range(6)}
    dcp.save(state, checkpoint_id=tmp_path / "stock", planner=planner(), no_dist=True)
    for number in range(3):
        save_in_background(tmp_path / f"{number}", state, planner=planner())
        assert blobs(tmp_path / f"{number}") == blobs(tmp_path / "stock")


def test_a_tensor_that_has_lost_its_memory_after_planning_is_named(tmp_path: Path) -> None:
    """The error has the one of many tensors whose data was freed or replaced too early."""
    state = {"kept": torch.zeros(1 << 20), "freed": torch.zeros(1 << 20)}
    writer = FileSystemWriterAsync(tmp_path / "saved")
    save_state_dict_async_plan(state, writer)
    state["freed"].untyped_storage().resize_(4)
    _, preload_fn, _ = writer.get_save_function_and_args()
    with pytest.raises(StagingError, match=r"; changed after planning: freed \[.*\(stage before"):
        preload_fn()


def test_writing_a_snapshot_twice_is_refused(tmp_path: Path) -> None:
    """After the first write its memory is free for others; a retry must not commit theirs."""
    writer = FileSystemWriterAsync(tmp_path / "saved")
    save_state_dict_async_plan(small_state(1), writer)
    save_fn, preload_fn, args = writer.get_save_function_and_args()
    args[1] = preload_fn()
    save_fn(*args)
    with pytest.raises(StagingError, match="already written"):
        save_fn(*args)


def test_a_second_snapshot_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    """The save whose snapshot was taken keeps its files, and is committed."""
    with AsyncCallsQueue() as queue, Hold("fsync") as hold, inject(hold.fault):
        _, request = planned(tmp_path, small_state())
        queue.schedule_async_request(request)
        hold.wait_reached()  # the file exists
        assert request.preload_fn is not None
        with pytest.raises(StagingError, match="already taken"):
            request.preload_fn()
        hold.release()
        queue.wait()
    assert nostall.verify(tmp_path).ok


@pytest.mark.usefixtures("given_up_soon")
def test_an_aborted_write_through_a_users_stream_stops(tmp_path: Path) -> None:
    """A retry in the same directory is not overwritten later by the thread of the save before."""
    opened: list[str] = []

    def open_file(path: str, mode: str) -> Any:
        opened.append(path)
        return open(path, mode)

    with Hold("open") as hold, AsyncCallsQueue() as queue:
        with inject(hold.fault):
            schedule(queue, tmp_path / "saved", small_state(1), open_file=open_file, thread_count=2)
            hold.wait_reached()
        queue.close(abort=True)
        schedule(queue, tmp_path / "saved", small_state(2), thread_count=2)
        queue.wait()
        hold.release()
    assert blobs(tmp_path / "saved") == blobs_by_stock(tmp_path / "stock", small_state(2))


def test_torchs_modes_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    """A default device is for the model; views kept from inference mode are written to later."""
    state = small_state(1)
    expected = blobs_by_stock(tmp_path / "stock", state)
    modes: list[Any] = [torch.device("meta"), torch.inference_mode(), nullcontext()]
    for mode in modes:
        with mode:
            save_now(tmp_path / "saved", state)
        assert blobs(tmp_path / "saved") == expected


def test_failed_saves_do_not_keep_memory_from_the_next_one(tmp_path: Path) -> None:
    """Their staged copies may live on in tracebacks of exceptions; no save waits for that."""
    futures: list[Any] = []
    for number in range(4):
        writer = FileSystemWriterAsync(tmp_path / "taken", overwrite=number == 0)
        futures.append(dcp.async_save(small_state(1), storage_writer=writer, no_dist=True))
        with pytest.raises(CheckpointException) if number else inject():
            futures[-1].result(60)
    save_in_background(tmp_path / "next", small_state(2))
    assert blobs(tmp_path / "next") == blobs_by_stock(tmp_path / "stock", small_state(2))


def test_a_writer_refuses_an_unknown_store_given_as_checkpoint_id(tmp_path: Path) -> None:
    """It must not end up in a local directory of that name."""
    writer = FileSystemWriterAsync(tmp_path / "saved")
    with pytest.raises(OptionError, match="are not supported"):
        dcp.save(small_state(), checkpoint_id="nowhere://x/y", storage_writer=writer, no_dist=True)


def test_a_caller_of_a_frameworks_own_needs_only_the_documented_methods() -> None:
    """A subclass that implements what the API names can be instantiated, and polled by ranks."""
    named = {"schedule_async_call", "is_current_async_call_done", "close"}
    own: Any = type("Own", (AsyncCaller,), dict.fromkeys(named, lambda *_: None))
    assert own().sync_all_async_calls(is_alive=False)


def test_a_stager_that_cannot_copy_everything_gives_its_memory_back() -> None:
    """Else the next saves would wait for memory that is never returned."""
    kept = []
    for _ in range(2 * EngineOptions().max_in_flight):
        state = {"w": torch.ones(3), "object": threading.Lock()}
        with pytest.raises(StagingError, match=r"'object' cannot be staged.*lock'") as caught:
            FileSystemWriterAsync("unused").stage(state)
        kept.append(caught)  # and with it the frames that hold the lease
    assert not default_engine().arena.anything_labelled
    lease = default_engine().lease(1)
    lease.release()


def test_options_are_not_changed_under_a_save_that_is_being_written(tmp_path: Path) -> None:
    """That would end the process that writes it."""
    queue = AsyncCallsQueue()
    with Hold() as hold:
        with inject(hold.fault):
            schedule(queue, tmp_path / "save", small_state(1))
            hold.wait_reached()
        with pytest.raises(OptionError, match="while saves are being written"):
            nostall.configure(EngineOptions(io_threads=2))
        hold.release()
        queue.close()
    assert blobs(tmp_path / "save") == blobs_by_stock(tmp_path / "stock", small_state(1))


def test_a_writer_takes_no_second_save_before_the_first_is_finalised(tmp_path: Path) -> None:
    """It would be finalised with the second one's results. One never scheduled fails as it ends."""
    writer, request = planned(tmp_path / "one", small_state(1))
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(request)
        with pytest.raises(OptionError, match="not finalised yet"):
            writer.reset(tmp_path / "two")
        with pytest.raises(OptionError, match="not finalised yet"):
            save_state_dict_async_plan(small_state(2), writer)
    assert blobs(tmp_path / "one") == blobs_by_stock(tmp_path / "stock", small_state(1))
    writer.reset(tmp_path / "two")
    arguments = save_state_dict_async_plan(small_state(), writer)
    with pytest.raises(CheckpointException, match="nothing was scheduled"):
        save_state_dict_async_finalize(*arguments)


def test_a_writer_process_that_cannot_be_started_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the interpreter, and the next save works."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", str(tmp_path / "none"))
        with pytest.raises(WriterDiedError, match="could not be started") as caught:
            nostall.warmup()
    assert caught.value.path == str(tmp_path / "none")
    nostall.warmup()


def test_memory_that_cannot_be_pinned_is_used_unpinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slower copies are no reason to fail a save; one warning says why they are slow."""
    driver = Mock()  # locks no memory, as under a limit on locked memory
    driver.cudaHostRegister.return_value = 2
    reset()
    with monkeypatch.context() as patch, caplog.at_level("WARNING", "nostall"):
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "cudart", lambda: driver)
        with AsyncCallsQueue() as queue:
            for number in range(3):
                schedule(queue, tmp_path / f"{number}", small_state(number))
        reset()
    for number in range(3):
        stock = blobs_by_stock(tmp_path / f"stock {number}", small_state(number))
        assert blobs(tmp_path / f"{number}") == stock
    driver.cudaHostRegister.assert_called_once()
    driver.cudaHostUnregister.assert_not_called()
    (warning,) = [each for each in caplog.records if each.name == "nostall"]
    assert "not pinned" in warning.getMessage()


WRONG: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *((EngineOptions, {"io_threads": value}) for value in ("4", 2000, True)),
    *((EngineOptions, {"save_timeout_s": value}) for value in ("1", True)),
    *((EngineOptions, {name: 3.0}) for name in ("chunk_nbytes", "cpu_priority")),
    *((EngineOptions, {name: "no"}) for name in ("copy_past_caches", "direct_io")),
    *((AsyncCallsQueue, {name: 50}) for name in ("cpu_priority", "io_priority")),
    (AsyncCallsQueue, {"sigterm_timeout": -1}),
    *((FileSystemWriterAsync, {"path": path}) for path in ("", "a\0b", "nowhere://bucket/step")),
    *((FileSystemWriterAsync, {"path": "unused", "thread_count": value}) for value in ("2", True)),
    *((FileSystemWriterAsync, {"path": "unused", "sync_files": value}) for value in ("no", None)),
    *((FileSystemWriterAsync, {"path": "unused", name: True}) for name in ("staging", "open_file")),
    (FileSystemWriterAsync, {"path": "unused", "overwrite": torch.tensor([True, False])}),
    (FileSystemWriterAsync, {"path": "unused", "single_file_per_rank": []}),
    (FileSystemWriterAsync, {"path": "unused", "separation_hint": 3, "thread_count": 2}),
    *((nostall.warmup, {"share": value}) for value in (-1, "1G")),
    (nostall.configure, {"options": {"io_threads": 2}}),
]


def test_an_argument_of_the_wrong_kind_is_refused_where_it_is_passed() -> None:
    """With an error that says what to use instead."""
    for call, options in WRONG:
        with pytest.raises(OptionError) as caught:
            call(**options)
        assert caught.value.hint, options


def test_a_module_is_told_from_its_state_dict() -> None:
    """``warmup(model)`` says what to pass; the module's text, of any length, is not repeated."""
    with pytest.raises(OptionError, match=r"type Linear \(pass the state dict") as caught:
        nostall.warmup(torch.nn.Linear(2, 2))  # type: ignore[arg-type]  # on purpose
    assert "number of bytes" in str(caught.value)


def test_options_take_numbers_of_numpys_and_0_and_1_as_stock_does(tmp_path: Path) -> None:
    """NumPy's numbers, and 0 and 1 for booleans, mean what they mean to stock."""
    options = {"thread_count": np.int64(2), "sync_files": np.False_, "overwrite": 1}
    writer = FileSystemWriterAsync(tmp_path / "ours", single_file_per_rank=0, **options)  # type: ignore[arg-type]  # on purpose
    stock = dcp.FileSystemWriter(tmp_path / "stock", single_file_per_rank=0, **options)  # type: ignore[arg-type]  # on purpose
    for each in (writer, stock):
        dcp.save(small_state(1), storage_writer=each, no_dist=True)
    assert blobs(tmp_path / "ours") == blobs(tmp_path / "stock")
    number = np.int64(2)
    given: dict[str, Any] = {"io_threads": number, "direct_io": 0, "save_timeout_s": np.float32(9)}
    nostall.configure(EngineOptions(**given))
    with AsyncCallsQueue() as queue:
        schedule(queue, tmp_path / "behind", small_state(1), thread_count=number)
    assert blobs(tmp_path / "behind") == blobs(tmp_path / "stock")


def test_a_relative_path_without_a_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to do; an absolute path needs neither it nor the client that Megatron asks for."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for use in (
        FileSystemWriterAsync,
        nostall.remove_checkpoint,
        lambda path: TorchAsyncCheckpoint().async_save({}, path),
    ):
        with pytest.raises(OptionError, match="working directory no longer exists") as caught:
            use("save")
        assert caught.value.path == "save"
        assert "absolute" in str(caught.value.hint)
    save_now(tmp_path / "save", small_state(1), use_msc=True)
    assert blobs(tmp_path / "save") == blobs_by_stock(tmp_path / "stock", small_state(1))


def test_an_option_set_after_the_role_counts(tmp_path: Path) -> None:
    """Stock's writer reads its attributes when it writes; subclasses rely on that."""

    class Several(FileSystemWriterAsync):
        def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
            super().set_up_storage_writer(*args, **kwargs)
            self.thread_count = 3

    dcp.save(small_state(), storage_writer=Several(tmp_path / "saved"), no_dist=True)
    assert len(list(tmp_path.glob("saved/*.distcp"))) == 3
