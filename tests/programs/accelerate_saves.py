"""Training with Accelerate and with the Trainer, on ranks.

Accelerate offers FSDP on accelerators only, although torch's FSDP2 runs on CPUs, too: here it takes
the ranks for those of GPUs.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration
from torch.distributed.checkpoint.api import CheckpointException
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from nostall.errors import OptionError
from nostall.integrations.accelerate import NostallAccelerator
from nostall.integrations.transformers import NostallTrainer
from support.blocked import Blocked
from support.faults import Hold, inject
from support.pages import code_blocks
from support.states import all_equal, local_values
from support.training_thread import Periods


def _take_for_gpus() -> None:
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class _Regression(torch.nn.Module):
    """Two layers with the signature of a model for the Trainer."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(width, width) for _ in range(depth)), torch.nn.Dropout(0.1)
        )

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}


class _Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, width: int = 16, length: int = 64) -> None:
        self._inputs = torch.randn(length, width, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._inputs[index], "labels": self._inputs[index].flip(0)}


def _arguments(out: Path, steps: int, **options: Any) -> TrainingArguments:
    found = TrainingArguments(
        **{
            "output_dir": str(out),
            "max_steps": steps,
            "save_steps": 2,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 4,
            "logging_strategy": "no",
            **options,
        },
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        fsdp=True,
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},
    )
    assert found.device.type == "cpu"
    _take_for_gpus()
    return found


def _fit(
    kind: type[Trainer],
    out: Path,
    steps: int,
    *,
    resume: str | bool | None = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    metrics: Any = None,
    **options: Any,
) -> Trainer:
    trainer = kind(
        model=_Regression(),
        args=_arguments(out, steps, **options),
        train_dataset=_Data(),
        eval_dataset=_Data(length=8),
        callbacks=list(callbacks),
        compute_metrics=metrics,
    )
    assert trainer.is_fsdp_enabled
    trainer.train(resume_from_checkpoint=resume)
    dist.barrier()
    return trainer


def _values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's part of parameters and of the optimizer's states."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return local_values([*model.parameters(), *states])


def _values_of(trainer: Trainer) -> list[torch.Tensor]:
    return _values(trainer.model, trainer.optimizer)


def _names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.is_dir())


# --- Trainer --------------------------------------------------------------------------------------


def resumed(out: Path) -> dict[str, Any]:
    """Our checkpoint is resumed by the Trainer and by ours like an uninterrupted run."""
    expected = _values_of(_fit(Trainer, out / "stock", 6))
    _fit(NostallTrainer, out / "ours", 4)
    saved = out / "ours" / "checkpoint-4"
    return {
        "names": _names(out / "ours"),
        "files": sorted(path.name for path in saved.iterdir()),
        "stock_files": sorted(path.name for path in (out / "stock" / "checkpoint-4").iterdir()),
        "same": {
            kind.__name__: all_equal(
                _values_of(_fit(kind, out / kind.__name__, 6, resume=str(saved))), expected
            )
            for kind in (Trainer, NostallTrainer)
        },
    }


class _Holding(TrainerCallback):  # type: ignore[misc]  # transformers is not installed for mypy
    """Stops the save of a step, and calls a function in the step after it."""

    def __init__(self, step: int, then: Callable[[], None]) -> None:
        self._step = step
        self._then = then
        self._hold = Hold("chunk")
        self._injected = ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._injected.enter_context(inject(self._hold.fault))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._injected.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._hold.wait_reached()
            self._then()
            self._hold.release()


def rotated(out: Path) -> dict[str, Any]:
    """The older checkpoint is removed when the newer one is committed."""
    seen: list[Any] = []

    def look() -> None:
        dist.barrier()
        seen.append([_names(out / "run"), os.path.basename(get_last_checkpoint(out / "run"))])
        dist.barrier()

    _fit(NostallTrainer, out / "run", 6, save_total_limit=1, callbacks=(_Holding(4, look),))
    return {"while_saving": seen, "names": _names(out / "run")}


def steady(out: Path) -> dict[str, list[dict[str, int]]]:
    """Work of this thread for the first saves, and for those after the third."""
    of_trainer, of_loop = Periods(0, 8, 14), Periods(0, 4, 7)

    class Reach(TrainerCallback):  # type: ignore[misc]  # as above
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            of_trainer.reach(state.global_step)

    _fit(NostallTrainer, out / "trainer", 16, save_total_limit=1, callbacks=(Reach(),))
    found = {"Trainer": of_trainer.close()}
    accelerator = _accelerator(
        NostallAccelerator, out / "loop", automatic_checkpoint_naming=True, total_limit=1
    )
    model, optimizer = _prepared(accelerator)
    for number in range(8):
        of_loop.reach(number)
        _steps(accelerator, model, optimizer, 2)
        accelerator.save_state()
    accelerator.end_training()
    return {**found, "Accelerate": of_loop.close()}


def best(out: Path) -> dict[str, Any]:
    """The best checkpoint is kept by rotation, named by its final directory, and loaded."""
    at_best: list[torch.Tensor] = []
    scores = iter([0.0, 1.0, 0.0, 0.0, 0.0])  # of five evaluations

    class Remember(TrainerCallback):  # type: ignore[misc]  # as above
        def on_save(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step == 4:
                at_best.extend(local_values(model.parameters()))

    trainer = _fit(
        NostallTrainer,
        out / "run",
        10,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        metrics=lambda _: {"score": next(scores)},
        callbacks=(Remember(),),
    )
    states = sorted((out / "run").glob("checkpoint-*/trainer_state.json"))
    return {
        "names": _names(out / "run"),
        "best": [
            os.path.relpath(json.loads(path.read_text())["best_model_checkpoint"], out)
            for path in states
        ],
        "same": all_equal(local_values(trainer.model.parameters()), at_best),
    }


def killed(out: Path) -> None:
    """All ranks are killed while the second save is being written."""

    def die() -> None:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    _fit(NostallTrainer, out / "run", 6, callbacks=(_Holding(4, die),))


def after_the_kill(out: Path) -> dict[str, Any]:
    """The next run resumes from the committed checkpoint, and removes what was left."""
    expected = _values_of(_fit(Trainer, out / "stock", 6))
    left, last = _names(out / "run"), get_last_checkpoint(out / "run")
    dist.barrier()
    trainer = _fit(NostallTrainer, out / "run", 6, resume=True)
    return {
        "left": left,
        "last": os.path.basename(last),
        "same": all_equal(_values_of(trainer), expected),
        "names": _names(out / "run"),
    }


def failing(out: Path) -> dict[str, Any]:
    """The save before a step that raises is committed, and the exception is raised."""

    class Fail(TrainerCallback):  # type: ignore[misc]  # as above
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("the training step fails")

    with pytest.raises(RuntimeError) as raised:
        _fit(NostallTrainer, out / "run", 6, callbacks=(Fail(),))
    dist.barrier()
    return {"message": str(raised.value), "names": _names(out / "run")}


def page(out: Path) -> dict[str, Any]:
    """The code of docs/frameworks.md, with a model to train."""
    trainer, accelerator = code_blocks("frameworks.md", "Accelerate and the Hugging Face `Trainer`")
    names: dict[str, Any] = {
        "model": _Regression(),
        "arguments": _arguments(out / "trainer", 2),
        "data": _Data(),
    }
    exec(trainer, names)
    names["trainer"].train()
    begin, end = accelerator.split("...\n")
    names = {"plugin": _plugin()}
    exec(begin, names)
    model, optimizer = _prepared(names["accelerator"])
    _steps(names["accelerator"], model, optimizer, 1)
    names["accelerator"].save_state(str(out / "accelerate"))
    exec(end, names)
    dist.barrier()
    return {"names": _names(out), "trainer": _names(out / "trainer")}


def recipe(out: Path) -> dict[str, Any]:
    """The program of docs/recipes.md, twice; at which steps training has begun."""
    os.chdir(out)
    (program,) = code_blocks("recipes.md", "Transformers")
    arguments, trainer = program.split("trainer = ")
    began: list[int] = []

    class Began(TrainerCallback):  # type: ignore[misc]  # transformers is not installed for mypy
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            began.append(state.global_step)

    for steps in (20, 40):
        names: dict[str, Any] = {"Began": Began}
        asked = f"max_steps={steps}, use_cpu=True, disable_tqdm=True"
        exec(arguments.replace("max_steps=40", asked), names)
        _take_for_gpus()
        exec("trainer = " + trainer.replace("args=", "callbacks=[Began()], args="), names)
        dist.barrier()
    return {"began": began, "names": _names(out / "run")}


# --- Accelerate -----------------------------------------------------------------------------------


def _plugin() -> FullyShardedDataParallelPlugin:
    os.environ["FORK_LAUNCHED"] = "1"  # the group that it finds is not its own to destroy
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    _take_for_gpus()
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )


def _accelerator(kind: type[Accelerator], out: Path, **options: Any) -> Accelerator:
    project = ProjectConfiguration(project_dir=str(out), **options)
    return kind(fsdp_plugin=_plugin(), project_config=project)


def _prepared(accelerator: Accelerator) -> tuple[Any, Any]:
    model = _Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared: tuple[Any, Any] = accelerator.prepare(model, optimizer)
    return prepared


def _steps(accelerator: Accelerator, model: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        inputs = torch.randn(4, 16)  # a resumed run continues with the same random numbers
        accelerator.backward(model(inputs, inputs.flip(1))["loss"])
        optimizer.step()
        optimizer.zero_grad()


def plain(out: Path) -> dict[str, Any]:
    """A loop of one's own: a directory that is saved twice, resumed by Accelerate and by ours."""
    path = str(out / "last")
    accelerator = _accelerator(NostallAccelerator, out)
    model, optimizer = _prepared(accelerator)
    _steps(accelerator, model, optimizer, 2)
    accelerator.save_state(path)
    _steps(accelerator, model, optimizer, 2)
    returned = accelerator.save_state(path)
    _steps(accelerator, model, optimizer, 2)
    expected = _values(model, optimizer.optimizer)
    accelerator.end_training()
    dist.barrier()
    same = {}
    for kind in (Accelerator, NostallAccelerator):
        resuming = _accelerator(kind, out)
        model, optimizer = _prepared(resuming)
        resuming.load_state(path)
        _steps(resuming, model, optimizer, 2)
        same[kind.__name__] = all_equal(_values(model, optimizer.optimizer), expected)
    return {
        "returned": os.path.relpath(returned, out),
        "files": sorted(file.name for file in (out / "last").iterdir()),
        "names": _names(out),
        "same": same,
    }


def named(out: Path) -> dict[str, Any]:
    """Automatic naming: the older checkpoint goes when the newer one is committed."""
    options: dict[str, Any] = {"automatic_checkpoint_naming": True, "total_limit": 1}
    accelerator = _accelerator(NostallAccelerator, out / "run", **options)
    model, optimizer = _prepared(accelerator)
    _steps(accelerator, model, optimizer, 1)
    accelerator.save_state()
    _steps(accelerator, model, optimizer, 1)
    hold = Hold("chunk")
    with inject(hold.fault):
        accelerator.save_state()
    at_save = _values(model, optimizer.optimizer)
    hold.wait_reached()
    _steps(accelerator, model, optimizer, 1)
    while_saving = _names(out / "run" / "checkpoints")
    hold.release()
    accelerator.load_state()
    same = all_equal(_values(model, optimizer.optimizer), at_save)
    accelerator.project_configuration.iteration = 1
    error = OptionError if dist.get_rank() == 0 else CheckpointException
    with pytest.raises(error, match="the checkpoint exists"):
        accelerator.save_state()
    accelerator.end_training()
    return {
        "while_saving": while_saving,
        "same": same,
        "names": [*_names(out / "run"), *_names(out / "run" / "checkpoints")],
    }


def _warnings() -> list[str]:
    """A list that gets nostall's warnings, each up to its first colon."""
    said: list[str] = []
    log = logging.Handler(logging.WARNING)
    log.emit = lambda record: said.append(record.getMessage().partition(":")[0])  # type: ignore[method-assign]  # its only use
    logging.getLogger("nostall").addHandler(log)
    return said


def _fit_plainly(out: Path, **options: Any) -> None:
    plain: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(str(out / "run"), max_steps=4, save_steps=2, **plain, **options)
    NostallTrainer(model=_Regression(), args=arguments, train_dataset=_Data()).train()


def _save_plainly(out: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = NostallAccelerator(cpu=True)
    _prepared(accelerator)
    for name in ("one", "two"):
        accelerator.save_state(str(out / name))


def one_device(out: Path) -> list[str]:
    """Lines that are logged in a process that no launcher has started."""
    said = _warnings()
    _fit_plainly(out)
    _save_plainly(out)
    return said


def stock(out: Path) -> dict[str, Any]:
    """Lines that are logged where saves are the frameworks' own, with DDP, and where ours."""
    said = _warnings()
    found: dict[str, Any] = {}
    for name, strategy in (("trainer", "steps"), ("trainer without saves", "no")):
        _fit_plainly(out, save_strategy=strategy, ddp_backend="gloo")
        found[name] = said.copy()
        said.clear()
    _save_plainly(out)
    found["accelerator"] = said.copy()
    said.clear()
    _accelerator(NostallAccelerator, out)
    found["sharded"] = said
    return {**found, "names": _names(out / "run")}


# --- how long saves block -------------------------------------------------------------------------

_EVERY = 8
_SAVES = 13


class _Timed(TrainerCallback):  # type: ignore[misc]  # as above
    def __init__(self) -> None:
        self.blocked = Blocked(every=_EVERY)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.blocked.step_ends()


def _time(kind: type[Trainer], out: Path) -> list[float]:
    timed = _Timed()

    class Timed(kind):  # type: ignore[misc]  # as above
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            timed.blocked.step_begins()
            return super().compute_loss(*args, **kwargs)

    steps = _EVERY * (_SAVES + 1)
    Timed(
        model=_Regression(1024, 8),  # 32 MiB; with Adam's states a checkpoint of 96 MiB
        args=_arguments(out, steps, save_steps=_EVERY, save_total_limit=1),
        train_dataset=_Data(1024, 256),
        callbacks=[timed],
    ).train()
    return timed.blocked.milliseconds()


def _time_loop(kind: type[Accelerator], out: Path) -> list[float]:
    """A loop of one's own: the saves, and ``backward``, where ours commits, up to the gradients."""
    accelerator = _accelerator(kind, out, automatic_checkpoint_naming=True, total_limit=1)
    module = _Regression(1024, 8)  # as for the Trainer
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    inputs = torch.randn(4, 1024)
    blocked = Blocked(every=_EVERY)
    for step in range(1, _EVERY * (_SAVES + 1) + 1):
        loss = model(inputs, inputs)["loss"]
        blocked.call_begins()
        loss.register_hook(lambda _: blocked.call_ends())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        blocked.step_ends()
        if step % _EVERY == 0:
            accelerator.save_state()
        blocked.step_begins()
    accelerator.end_training()
    dist.barrier()
    return blocked.milliseconds()


def measure(out: Path) -> dict[str, list[float]]:
    """Two ranks, FSDP2: the saves of the Trainer and of Accelerate, and ours."""
    faulthandler.cancel_dump_traceback_later()  # this takes longer than a test may
    times = {kind.__name__: _time(kind, out / kind.__name__) for kind in (Trainer, NostallTrainer)}
    loops = (Accelerator, NostallAccelerator)
    return times | {kind.__name__: _time_loop(kind, out / kind.__name__) for kind in loops}
