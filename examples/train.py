"""Train a small sharded transformer, and save it with nostall without stalling the training loop.

Run it on two CPU processes::

    torchrun --nproc-per-node 2 examples/train.py --out checkpoints --steps 40
    torchrun --nproc-per-node 2 examples/train.py --out checkpoints --steps 80 --resume

A byte-level transformer, sharded with FSDP2, learns the help texts that every CPython carries.
Every few steps `AsyncSaver.save` takes a snapshot, and training goes on while another process
writes it. `load_latest` resumes; stock's `dcp.load` could, too. Batches depend on the step and the
rank alone, so a resumed run repeats the losses of an uninterrupted one bit for bit; demo.py checks
that, also after a kill in the middle of a save.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import nostall
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

VOCABULARY = 256  # bytes
CONTEXT = 64
SEQUENCES_PER_RANK = 4
FILES_PER_RANK = 2
POLL_EVERY_S = 0.05
"""Stands in for a training step where saves are timed; real steps are usually longer."""

State = dict[str, Any]


# --------------------------------------------------------------------------------------------------
# Model and text
# --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One pre-norm transformer layer: causal self-attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        packed = self.query_key_value(self.attention_norm(hidden))
        split = packed.unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = split.unbind(dim=2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).flatten(2))
        transformed: Tensor = hidden + self.mlp(hidden)
        return transformed


class ByteTransformer(nn.Module):
    """Predicts the next byte: `(batch, context)` bytes in, `(batch, context, 256)` logits out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads=width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def build_model(width: int, layers: int) -> ByteTransformer:
    """Build the same model on every rank, then keep only this rank's shard of every parameter."""
    torch.manual_seed(0)
    model = ByteTransformer(width, layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def load_text() -> Tensor:
    """Return the help texts behind Python's own `help()` as one tensor of bytes."""
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def batch_at(text: Tensor, step: int) -> Tensor:
    """Return this rank's `(batch, context + 1)` bytes of a step, the same in every run."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - CONTEXT, (SEQUENCES_PER_RANK, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].long()


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Take one optimizer step and return the loss averaged over all ranks."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def record_loss(losses: Path | None, step: int, loss: float) -> None:
    """Append one JSON line; it holds the `repr` of the loss, which reads back as the same float."""
    if losses is not None and dist.get_rank() == 0:
        with losses.open("a") as stream:
            stream.write(json.dumps({"step": step, "loss": loss}) + "\n")


def train(args: argparse.Namespace) -> None:
    """Train up to `args.steps` steps and save every `args.save_every` of them."""
    text = load_text()
    model = build_model(args.width, args.layers)
    optimizer = build_optimizer(model)
    start = load_latest(args.out, model, optimizer) if args.resume else 0
    with AsyncCallsQueue() as queue:
        saver = AsyncSaver(queue)
        for step in range(start, args.steps):
            loss = train_step(model, optimizer, batch_at(text, step))
            record_loss(args.losses, step, loss)
            saver.poll()
            done = step + 1
            if done % args.save_every == 0:
                saver.save(step_directory(args.out, done), training_state(model, optimizer, done))
            if done == args.kill_at_step:
                die(marker=args.out / "killed")
        saver.wait()


def die(marker: Path) -> None:
    """Kill every rank where it stands, as a scheduler or the kernel would."""
    if dist.get_rank() == 0:
        marker.touch()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------


class AsyncSaver:
    """Saves checkpoints through nostall, one at a time, while training goes on.

    Every method is collective: call it on every rank, in the same order.
    """

    def __init__(self, queue: AsyncCallsQueue) -> None:
        self._queue = queue
        self._metadata_cache = CheckpointMetadataCache()

    def save(self, directory: Path, state: State) -> None:
        """Take a snapshot of `state` and start writing it; `state` may change once this returns."""
        self.wait()
        writer = FileSystemWriterAsync(directory, thread_count=FILES_PER_RANK)
        planned = save_state_dict_async_plan(
            state,
            writer,
            None,
            0,
            planner=DefaultSavePlanner(),
            enable_cache=True,
            metadata_cache=self._metadata_cache,
        )
        save_fn, preload_fn, save_args = writer.get_save_function_and_args()

        def commit() -> None:
            save_state_dict_async_finalize(*planned)

        def report() -> None:
            if dist.get_rank() == 0:
                print(f"committed {directory.name}", flush=True)

        request = AsyncRequest(
            save_fn, save_args, [commit, report], async_fn_kwargs={}, preload_fn=preload_fn
        )
        self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Commit the save in flight if every rank has written its part; return at once if not."""
        self._queue.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """Wait until the save in flight, if there is one, is committed."""
        self._queue.maybe_finalize_async_calls(blocking=True)

    @property
    def pending(self) -> bool:
        """Whether a save is in flight."""
        return self._queue.get_num_unfinalized_calls() > 0


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> State:
    """Return everything that a run needs to go on after `step` finished steps."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def step_directory(root: Path, step: int) -> Path:
    """Return where the checkpoint after `step` finished steps lives; names sort like steps."""
    return root / f"step-{step:06d}"


def latest_complete(root: Path) -> Path | None:
    """Return the newest complete checkpoint, the same one on every rank.

    `.metadata` is what makes a checkpoint complete: it appears when all other files are durable.
    """
    found = [max((path.parent for path in root.glob("step-*/.metadata")), default=None)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def load_latest(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint; return its finished steps, or 0."""
    directory = latest_complete(root)
    if directory is None:
        return 0
    state = training_state(model, optimizer, step=0)
    nostall.load(state, directory, process_group=dist.group.WORLD)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    step: int = state["step"]
    if dist.get_rank() == 0:
        print(f"resumed from {directory.name}", flush=True)
    return step


# --------------------------------------------------------------------------------------------------
# Measuring: nostall and stock PyTorch save the same state in turns
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTiming:
    """The cost of one save; the slowest rank counts."""

    blocked_ms: float
    """How long the training loop stood still, from the call to its return and later in polls."""
    durable_s: float
    """From the call until `.metadata` and every file were on disk."""


def time_nostall(saver: AsyncSaver, directory: Path, state: State) -> SaveTiming:
    """Time a nostall save; what its polls take until the commit counts as blocked."""
    started = time.perf_counter()
    saver.save(directory, state)
    blocked_s = time.perf_counter() - started
    while saver.pending:
        time.sleep(POLL_EVERY_S)
        polled = time.perf_counter()
        saver.poll()
        blocked_s += time.perf_counter() - polled
    return SaveTiming(blocked_ms=blocked_s * 1e3, durable_s=time.perf_counter() - started)


def time_dcp_save(directory: Path, state: State) -> SaveTiming:
    """Time stock `dcp.save`, which blocks until all is durable."""
    started = time.perf_counter()
    dcp.save(state, storage_writer=FileSystemWriter(directory, thread_count=FILES_PER_RANK))
    durable_s = time.perf_counter() - started
    return SaveTiming(blocked_ms=durable_s * 1e3, durable_s=durable_s)


def time_dcp_async_save(directory: Path, state: State) -> SaveTiming:
    """Time stock `dcp.async_save` with its default stager and its default thread."""
    started = time.perf_counter()
    upload = dcp.async_save(
        state, storage_writer=FileSystemWriter(directory, thread_count=FILES_PER_RANK)
    )
    blocked_s = time.perf_counter() - started
    assert isinstance(upload, Future)  # it is something else only with an asynchronous stager
    upload.result()
    return SaveTiming(blocked_ms=blocked_s * 1e3, durable_s=time.perf_counter() - started)


def slowest_rank(*figures: float) -> list[float]:
    """Return the maximum over all ranks of each figure. Collective."""
    largest = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    figures_of_all: list[float] = largest.tolist()
    return figures_of_all


def report_save(name: str, turn: int, directory: Path, timing: SaveTiming) -> None:
    """Print one JSON line about a save."""
    nbytes = sum(file.stat().st_size for file in directory.iterdir())
    saved = {"contender": name, "round": turn, "nbytes": nbytes}
    print(json.dumps(saved | asdict(timing)), flush=True)


def warm_free_memory(scratch: Path, state_nbytes: int) -> None:
    """Write and remove a file as large as this rank's state and the page cache of its files.

    Collective: the files of all ranks are there together, as their copies will be.

    Hypervisors take back what a virtual machine has freed. Who writes through the page cache would
    pay for bringing it in again, and that would depend on who saved before. So would what the heap
    keeps and what removing files costs; so the heap is trimmed and the directory synced.
    """
    with scratch.open("wb") as stream:
        for _ in range(2 * state_nbytes >> 20):
            stream.write(bytes(1 << 20))
        stream.flush()
        os.fsync(stream.fileno())
    dist.barrier()
    scratch.unlink()
    directory = os.open(scratch.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def measure(args: argparse.Namespace) -> None:
    """Let nostall and stock PyTorch save and load the same state in turns; rank 0 prints each.

    Every save is durable, and deleted, before the next one starts, and each begins with free memory
    that was used a moment ago. Round 0 is a warm-up. The model is at first a quarter as wide, and
    is widened, up to `args.width`, while a warm-up and a round of the next width fit into
    `args.seconds`; so a slow machine measures a smaller state, fewer rounds, or both.
    """
    with AsyncCallsQueue() as queue:
        began = time.perf_counter()
        saves_end = began + 0.75 * args.seconds
        for narrower in (4, 2, 1):
            saver, state, nbytes = state_to_measure(args, queue, narrower)
            started = time.perf_counter()
            measure_saves(args, saver, state, nbytes, turn=0)
            # Twice as wide is four times as large; a warm-up and a round of it have to fit.
            if passed_anywhere(saves_end - 8 * (time.perf_counter() - started)):
                break
        for turn in range(1, args.rounds + 1):
            measure_saves(args, saver, state, nbytes, turn)
            if passed_anywhere(saves_end):
                break
        measure_loads(args, saver, state, nbytes, began + args.seconds)


def state_to_measure(
    args: argparse.Namespace, queue: AsyncCallsQueue, narrower: int
) -> tuple[AsyncSaver, State, int]:
    """Return a saver, a state of a model of the asked width / `narrower`, and this rank's bytes."""
    model = build_model(max(args.width // narrower // 64, 1) * 64, args.layers)
    optimizer = build_optimizer(model)
    train_step(model, optimizer, batch_at(load_text(), step=0))
    nbytes = 3 * sum(parameter.to_local().nbytes for parameter in model.parameters())
    return AsyncSaver(queue), training_state(model, optimizer, step=1), nbytes


def passed_anywhere(moment: float) -> bool:
    """Return whether a moment has passed on any rank, so that all decide alike. Collective."""
    (overdue_s,) = slowest_rank(time.perf_counter() - moment)
    return overdue_s > 0


def measure_saves(
    args: argparse.Namespace, saver: AsyncSaver, state: State, nbytes: int, turn: int
) -> None:
    """Time one save by each contender."""
    contenders: list[tuple[str, Callable[[Path, State], SaveTiming]]] = [
        ("nostall", lambda directory, state: time_nostall(saver, directory, state)),
        ("dcp.save", time_dcp_save),
        ("dcp.async_save", time_dcp_async_save),
    ]
    first = turn % len(contenders)  # so that nobody always goes first
    for name, time_save in contenders[first:] + contenders[:first]:
        directory = args.out / f"{name}-{turn}"
        warm_free_memory(args.out / f"scratch-{dist.get_rank()}", nbytes)
        dist.barrier()
        own = time_save(directory, state)
        blocked_ms, durable_s = slowest_rank(own.blocked_ms, own.durable_s)
        if dist.get_rank() == 0:
            timing = SaveTiming(blocked_ms=blocked_ms, durable_s=durable_s)
            report_save(name, turn, directory, timing)
            shutil.rmtree(directory)


def measure_loads(
    args: argparse.Namespace, saver: AsyncSaver, state: State, nbytes: int, end: float
) -> None:
    """Load one checkpoint with nostall and with stock PyTorch in turns, from the page cache.

    The cache has the files after round 0, the warm-up.
    """
    directory = args.out / "loaded"
    saver.save(directory, state)
    saver.wait()
    loaders: list[tuple[str, Callable[[], object]]] = [
        ("nostall.load", lambda: nostall.load(state, directory, process_group=dist.group.WORLD)),
        ("dcp.load", lambda: dcp.load(state, checkpoint_id=directory)),
    ]
    for turn in range(args.rounds + 1):
        for name, load in loaders:
            warm_free_memory(args.out / f"scratch-{dist.get_rank()}", nbytes)
            dist.barrier()
            started = time.perf_counter()
            load()
            (load_s,) = slowest_rank(time.perf_counter() - started)
            if dist.get_rank() == 0:
                print(json.dumps({"loader": name, "round": turn, "load_s": load_s}), flush=True)
        loaders.reverse()
        if turn > 0 and passed_anywhere(end):
            break


# --------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory of the checkpoints")
    add("--steps", type=int, default=40, help="train up to this many steps, earlier runs included")
    add("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    add("--resume", action="store_true", help="go on from the newest complete checkpoint")
    add("--losses", type=Path, help="append the loss of every step to this file, as JSON lines")
    add("--kill-at-step", type=int, help="SIGKILL every rank once the save of this step started")
    add("--width", type=int, default=256, help="width of the model, a multiple of 64")
    add("--layers", type=int, default=4, help="layers of the model")
    add(
        "--measure",
        action="store_true",
        help="do not train: time saves and loads, nostall's and stock's",
    )
    add("--rounds", type=int, default=5, help="how often to time each, after one warm-up")
    add(
        "--seconds",
        type=float,
        default=60,
        help="about how long to measure: the rounds, and the "
        "width, shrink to what the machine can do in this time",
    )
    args = parser.parse_args()
    if args.kill_at_step is not None and args.kill_at_step % args.save_every:
        parser.error("--kill-at-step must be a step that is saved: a multiple of --save-every")
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    try:
        if args.measure:
            measure(args)
        else:
            train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
