"""Training with Lightning, for one process and for ranks."""

from __future__ import annotations

import faulthandler
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from nostall.integrations.lightning import (
    NostallCheckpointIO,
    NostallModelParallelStrategy,
)
from support.blocked import Blocked
from support.pages import code_blocks
from support.states import all_equal, local_values, names
from support.training_thread import Periods

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Regression(pl.LightningModule):  # type: ignore[misc]  # Lightning is not installed for mypy
    """Two layers and Adam on four fixed batches per epoch."""

    def __init__(self, width: int = 16, fails_in: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )
        self._fails_in = fails_in

    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None and not isinstance(next(self.parameters()), DTensor):
            fully_shard(self.layers, mesh=mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.current_epoch == self._fails_in:
            raise RuntimeError("the training step fails")
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)


def trainer(
    out: Path, epochs: int, callbacks: tuple[Any, ...] = (), *, keeps: int = 1, **options: Any
) -> Any:
    """A trainer that saves after every epoch and keeps the last checkpoint, or all for -1."""
    keep = ModelCheckpoint(dirpath=out, filename="{epoch}", save_top_k=keeps)
    return pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": epochs, **options},
        callbacks=[keep, *callbacks],
        **QUIET,
    )


def fit(
    out: Path, epochs: int, *, resume: Path | None = None, **options: Any
) -> tuple[list[torch.Tensor], list[str]]:
    """Train; returns this rank's parameters and the names of the checkpoints."""
    model = Regression(fails_in=options.pop("fails_in", None))
    trainer(out, epochs, **options).fit(model, ckpt_path=None if resume is None else str(resume))
    if dist.is_initialized():
        dist.barrier()
    return local_values(model.trainer.model.parameters()), names(out)


def ddp(out: Path) -> dict[str, Any]:
    ranks: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    expected, _ = fit(out / "stock", 4, **ranks)
    _, made = fit(out / "ours", 2, plugins=[NostallCheckpointIO()], **ranks)
    resumed, _ = fit(out / "on", 4, resume=out / "ours" / "epoch=1.ckpt", **ranks)
    return {"names": made, "same": all_equal(resumed, expected)}


def launched(out: Path, strategy: str) -> dict[str, Any]:
    """Lightning starts the ranks from this process, which saves once more and loads that."""
    fitted = trainer(out, 2, strategy=strategy, devices=2, plugins=[NostallCheckpointIO()])
    model = Regression()
    fitted.fit(model)
    saved = torch.load(out / "epoch=1.ckpt")["state_dict"]
    fitted.save_checkpoint(out / "after.ckpt")
    after = Regression.load_from_checkpoint(out / "after.ckpt").state_dict()
    found = [list(each.values()) for each in (model.state_dict(), saved, after)]
    return {
        "names": names(out),
        "trained": not all_equal(found[0], list(Regression().parameters())),
        "same": [all_equal(found[0], each) for each in found[1:]],
    }


def sharded(out: Path) -> dict[str, Any]:
    """A sharded strategy: our checkpoint is resumed by ours and by Lightning's."""
    expected, _ = fit(out / "stock", 4, **_fsdp2(ModelParallelStrategy))
    mine, made = fit(out / "ours", 2, **_fsdp2())
    saved = out / "ours" / "epoch=1.ckpt"
    files = names(saved)
    resumed = {
        kind.__name__: fit(out / kind.__name__, 4, resume=saved, **_fsdp2(kind))[0]
        for kind in (ModelParallelStrategy, NostallModelParallelStrategy)
    }
    return {
        "names": made,
        "files": files,
        "rows": [len(values) for values in mine],
        "same": {kind: all_equal(values, expected) for kind, values in resumed.items()},
    }


def after_the_fit(out: Path) -> dict[str, list[str]]:
    """Files right after saves that follow a fit, to a path and to an address."""
    found = {}
    for kind in (ModelParallelStrategy, NostallModelParallelStrategy):
        (out / kind.__name__).mkdir(exist_ok=True)
        os.chdir(out / kind.__name__)
        fitted = trainer(Path("fit"), 1, **_fsdp2(kind))
        fitted.fit(Regression())
        for path in ("one.ckpt", "memory://runs/two.ckpt"):
            fitted.save_checkpoint(path)
        dist.barrier()
        found[kind.__name__] = sorted(map(str, Path().glob("**/*.*")))
        dist.barrier()
    return found


def beside_a_strategy(out: Path) -> dict[str, Any]:
    """The plugin for files beside Lightning's strategy for shards, which saves by itself."""
    found: dict[str, Any] = {}
    for keeps in (1, -1):
        with _said() as made:
            options = _fsdp2(ModelParallelStrategy)
            fitted = trainer(
                out / f"{keeps}", 3, keeps=keeps, plugins=[NostallCheckpointIO()], **options
            )
        with _said() as run:
            fitted.fit(Regression())
        dist.barrier()
        found[f"keeps {keeps}"] = {"names": names(out / f"{keeps}"), "made": made, "run": run}
    with _said() as beside_others:
        trainer(out / "file", 1, plugins=[NostallCheckpointIO()], strategy="ddp", devices=2)
        options = _fsdp2(partial(ModelParallelStrategy, save_distributed_checkpoint=False))
        trainer(out / "full", 1, plugins=[NostallCheckpointIO()], **options)
    return {**found, "others": beside_others}


@contextmanager
def _said() -> Iterator[list[str]]:
    """How the warnings about nostall's classes begin, after the block."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield found
    messages = [str(each.message).partition(":")[0] for each in said]
    found += [each for each in messages if "Nostall" in each]


def steady(out: Path) -> list[dict[str, int]]:
    """Work of this thread for the first saves, and for those after the third."""
    periods = Periods(0, 4, 7)

    class Reach(pl.Callback):  # type: ignore[misc]  # as above
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            periods.reach(trainer.current_epoch)

    fit(out, 8, callbacks=(Reach(),), **_fsdp2())
    return periods.close()


def overwritten(out: Path) -> dict[str, Any]:
    """A ``meta.pt`` of a save that a crash ended before its commit is not used."""
    model = Regression()
    fit(out / "one", 1, **_fsdp2())
    fit(out / "two", 2, **_fsdp2())
    if dist.get_rank() == 0:
        shutil.copy(out / "two" / "epoch=1.ckpt" / "meta.pt", out / "one" / "epoch=0.ckpt")
    dist.barrier()
    began: list[int] = []

    class Began(pl.Callback):  # type: ignore[misc]  # as above
        def on_train_start(self, trainer: Any, module: Any) -> None:
            began.append(trainer.current_epoch)

    resumed = trainer(out / "three", 3, callbacks=(Began(),), **_fsdp2())
    resumed.fit(model, ckpt_path=str(out / "one" / "epoch=0.ckpt"))
    return {"began": began}


def failing(out: Path) -> dict[str, Any]:
    """An exception in training loses no scheduled save; after it no process is left."""
    message = ""
    try:
        fit(out, 3, fails_in=2, **_fsdp2())
    except RuntimeError as error:
        message = str(error)
    dist.barrier()
    return {"message": message, "files": sorted(path.name for path in out.glob("*/.metadata"))}


def documented(out: Path) -> dict[str, Any]:
    """The code of docs/frameworks.md for a sharded strategy, with a model to fit."""
    os.chdir(out)
    namespace: dict[str, Any] = {}
    exec(code_blocks("frameworks.md")[1], namespace)
    namespace["trainer"].fit(Regression())
    dist.barrier()
    return {"files": sorted(path.name for path in out.glob("**/*.ckpt/*"))}


def _fsdp2(kind: Any = NostallModelParallelStrategy) -> dict[str, Any]:
    return {"strategy": kind(data_parallel_size=2, tensor_parallel_size=1), "devices": 2}


# --- how long saves block -------------------------------------------------------------------------


class _Timed(pl.Callback):  # type: ignore[misc]  # as above
    def __init__(self) -> None:
        self.blocked = Blocked(every=_EVERY)

    def on_train_batch_end(self, *_: Any) -> None:
        self.blocked.step_ends()


_EVERY = 12
_SAVES = 13


class _Large(Regression):
    """32 MiB of parameters; with Adam's states a checkpoint of 96 MiB."""

    def __init__(self, timed: _Timed) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
        self._timed = timed

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(4096, 1024)), batch_size=4)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self._timed.blocked.step_begins()
        return torch.mean(self.layers(batch[0]).square())


def _time(out: Path, **options: Any) -> list[float]:
    timed = _Timed()
    keep = ModelCheckpoint(dirpath=out, save_top_k=1, every_n_train_steps=_EVERY)
    pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, **options},
        max_steps=_EVERY * (_SAVES + 1),
        callbacks=[timed, keep],
        **QUIET,
    ).fit(_Large(timed))
    return timed.blocked.milliseconds()


def measure_files(out: Path) -> dict[str, list[float]]:
    """One device: Lightning's default, Lightning in a thread, and ours."""
    kinds = (TorchCheckpointIO, AsyncCheckpointIO, NostallCheckpointIO)
    return {kind.__name__: _time(out / kind.__name__, plugins=[kind()]) for kind in kinds}


def measure(out: Path) -> dict[str, list[float]]:
    """Two ranks, FSDP2: Lightning's default, and ours."""
    faulthandler.cancel_dump_traceback_later()  # this takes longer than a test may
    kinds = (ModelParallelStrategy, NostallModelParallelStrategy)
    return {kind.__name__: _time(out / kind.__name__, **_fsdp2(kind)) for kind in kinds}
