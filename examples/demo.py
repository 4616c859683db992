"""See nostall keep its promises on this machine: `python examples/demo.py`, or with `--quick`.

1. Train without interruption and save every few steps.
2. Do the same, and SIGKILL every rank in the middle of a save.
3. Resume from the newest complete checkpoint. Losses and checkpoints must equal those of 1 exactly.
4. Save one larger state in turns with nostall, `dcp.save` and `dcp.async_save`, load it with
   `nostall.load` and `dcp.load`, and time each.

Exits with 0 if every promise held, otherwise with 1 and a message. All training runs in train.py,
under torchrun, on two CPU processes; train.py is also the code that you would copy.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

TRAIN = Path(__file__).with_name("train.py")
RANKS = 2
STILL_LIMIT_S = 600
"""A run that neither prints nor writes anything for so long is stuck, however slow the machine."""
TORCHRUN_GRACE_S = 40
"""After SIGTERM, torchrun gives its workers 30 s before it kills them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How much the demo does."""

    steps: int
    save_every: int
    kill_at: int
    """The step whose save is in flight when the kill comes."""
    measured_width: int
    rounds: int

    @property
    def resume_at(self) -> int:
        """The last save before the one in flight; train.py commits it before it starts another."""
        return self.kill_at - self.save_every


FULL = Scenario(steps=30, save_every=6, kill_at=18, measured_width=1024, rounds=5)
QUICK = Scenario(steps=6, save_every=2, kill_at=4, measured_width=256, rounds=2)


class PromiseBroken(Exception):
    """A check failed; the message says which one and how."""


def check(promise: str, *, holds: bool, otherwise: str) -> None:
    """Print a promise that holds, or raise `PromiseBroken` with what is there instead."""
    if not holds:
        raise PromiseBroken(f"not so: {promise}\n{otherwise}")
    print(f"   ok  {promise}", flush=True)


# --------------------------------------------------------------------------------------------------
# Running train.py
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run of train.py that ended by itself, well or badly."""

    returncode: int
    output: str
    """Everything that torchrun and all ranks wrote to stdout and stderr."""

    def expect_success(self) -> None:
        """Raise `PromiseBroken` with the output if the run failed."""
        if self.returncode != 0:
            raise PromiseBroken(f"train.py ended with {self.returncode}:\n{self.output}")


def torchrun(arguments: Sequence[str], files: Path) -> FinishedRun:
    """Run train.py on every rank, without restarts, for as long as it makes progress."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = ["--nproc-per-node", str(RANKS), "--max-restarts", "0"]
    process = subprocess.Popen(
        [*launcher, *ranks, str(TRAIN), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # or torchrun warns that it sets just that
    )
    return wait_for(process, files, STILL_LIMIT_S)


def wait_for(process: subprocess.Popen[str], files: Path, still_limit_s: float) -> FinishedRun:
    """Wait until a run ends, for as long as it prints, or changes files below `files`.

    Raises:
        PromiseBroken: It has done neither for `still_limit_s`, or twice that at most. It is stopped
            then.
    """
    seen: object = None
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=still_limit_s)
                return FinishedRun(returncode=process.returncode, output=output)
            except subprocess.TimeoutExpired as expired:
                printed = expired.output or b""
                before, seen = seen, (printed, changes_below(files))
                if seen == before:
                    said = printed.decode(errors="replace")
                    still = f"train.py made no progress for {still_limit_s:g} s; it had printed:"
                    raise PromiseBroken(f"{still}\n{said}") from expired
    except BaseException:
        stop(process)
        raise


def changes_below(directory: Path) -> list[tuple[str, int, int]]:
    """Return the path, size and time of change of every file, as far as they still exist."""
    changes = []
    for path in sorted(directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            changes.append((str(path), status.st_size, status.st_mtime_ns))
    return changes


def stop(process: subprocess.Popen[str]) -> None:
    """Stop torchrun and its workers.

    Every worker has a session of its own, where no signal to torchrun's process group arrives. So
    torchrun is asked to stop its workers, and its group is killed only if it does not.
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=TORCHRUN_GRACE_S)
        return
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


# --------------------------------------------------------------------------------------------------
# What a run leaves behind
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFiles:
    """Where a run keeps its checkpoints, and the losses it recorded."""

    checkpoints: Path
    losses: Path

    @property
    def root(self) -> Path:
        """The directory that both are in."""
        return self.checkpoints.parent

    def arguments(self, scenario: Scenario) -> list[str]:
        """Return the arguments that make train.py use these files."""
        files = ["--out", str(self.checkpoints), "--losses", str(self.losses)]
        steps = ["--steps", str(scenario.steps), "--save-every", str(scenario.save_every)]
        return files + steps

    def read_losses(self) -> dict[int, float]:
        """Return the recorded loss of each step, exactly as it was computed."""
        records = [json.loads(line) for line in self.losses.read_text().splitlines()]
        return {record["step"]: record["loss"] for record in records}

    def committed_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints: those that have a `.metadata` file."""
        committed = self.checkpoints.glob("step-*/.metadata")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in committed)

    def read_checkpoint(self, step: int) -> Any:
        """Read a whole checkpoint with stock PyTorch; nothing here imports nostall."""
        with tempfile.TemporaryDirectory(dir=self.checkpoints) as scratch:
            converted = Path(scratch) / "checkpoint.pt"
            dcp_to_torch_save(self.checkpoints / f"step-{step:06d}", converted)
            return torch.load(converted)


def check_same_losses(
    whose: str, expected: dict[int, float], actual: dict[int, float], steps: range
) -> None:
    """Check that a run recorded these steps and no others, each with exactly the expected loss."""
    differing = [
        f"step {step}: {actual.get(step)!r}, first run {expected[step]!r}"
        for step in steps
        if actual.get(step) != expected[step]
    ]
    check(
        f"{whose} losses of steps {steps.start} to {steps.stop - 1} equal the first run's exactly",
        holds=list(actual) == list(steps) and not differing,
        otherwise=f"recorded steps: {list(actual)}; different losses: {'; '.join(differing)}",
    )


def check_same_checkpoint(step: int, expected: TrainingFiles, actual: TrainingFiles) -> None:
    """Check that stock PyTorch reads exactly the same values from a checkpoint of two runs."""
    differing = differing_values(expected.read_checkpoint(step), actual.read_checkpoint(step))
    check(
        f"checkpoint of step {step}, read by stock PyTorch, equals the first run's exactly",
        holds=not differing,
        otherwise=f"different values: {', '.join(differing)}",
    )


def differing_values(expected: Any, actual: Any, name: str = "checkpoint") -> list[str]:
    """Return the names of all values in two nested state dicts that are not the same."""
    match expected, actual:
        case dict(), dict() if expected.keys() == actual.keys():
            keys = list(expected)
        case ((list() | tuple()), (list() | tuple())) if len(expected) == len(actual):
            keys = list(range(len(expected)))
        case torch.Tensor(), torch.Tensor():
            same = expected.dtype == actual.dtype and torch.equal(expected, actual)
            return [] if same else [name]
        case _:
            return [] if expected == actual else [name]
    nested = [differing_values(expected[key], actual[key], f"{name}.{key}") for key in keys]
    return [differing for names in nested for differing in names]


# --------------------------------------------------------------------------------------------------
# Training, killed and resumed
# --------------------------------------------------------------------------------------------------


def train_without_interruption(scenario: Scenario, files: TrainingFiles) -> dict[int, float]:
    """Run all steps at once and return the loss of each."""
    torchrun(files.arguments(scenario), files.root).expect_success()
    losses = files.read_losses()
    check(
        f"all {scenario.steps} steps have a loss",
        holds=list(losses) == list(range(scenario.steps)),
        otherwise=f"only these have one: {list(losses)}",
    )
    before, after = losses[0], losses[scenario.steps - 1]
    check(
        f"the model learns: loss {before:.3f} at first, {after:.3f} at last",
        holds=after < before,
        otherwise=f"the losses are {losses}",
    )
    planned = list(range(scenario.save_every, scenario.steps + 1, scenario.save_every))
    check(
        f"checkpoints of steps {planned} are complete",
        holds=files.committed_steps() == planned,
        otherwise=f"complete are {files.committed_steps()}",
    )
    return losses


def train_until_killed(
    scenario: Scenario, files: TrainingFiles, expected: dict[int, float]
) -> None:
    """Run into a SIGKILL; the save in flight must not count, and all those before it must."""
    kill = ["--kill-at-step", str(scenario.kill_at)]
    run = torchrun([*files.arguments(scenario), *kill], files.root)
    check(
        f"every rank was killed with the save of step {scenario.kill_at} in flight",
        holds=run.returncode != 0 and (files.checkpoints / "killed").exists(),
        otherwise=f"train.py ended with {run.returncode}:\n{run.output}",
    )
    planned = list(range(scenario.save_every, scenario.kill_at, scenario.save_every))
    check(
        f"checkpoints of steps {planned} are complete, that of step {scenario.kill_at} is not",
        holds=files.committed_steps() == planned,
        otherwise=f"complete are {files.committed_steps()}",
    )
    check_same_losses("the killed run's", expected, files.read_losses(), range(scenario.kill_at))


def train_resumed(scenario: Scenario, files: TrainingFiles, expected: dict[int, float]) -> None:
    """Resume from the newest complete checkpoint and run to the end."""
    torchrun([*files.arguments(scenario), "--resume"], files.root).expect_success()
    resumed = range(scenario.resume_at, scenario.steps)
    check_same_losses("the resumed run's", expected, files.read_losses(), resumed)


# --------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSave:
    """One line that `train.py --measure` prints."""

    contender: str
    round: int
    nbytes: int
    blocked_ms: float
    durable_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoad:
    """Another such line."""

    loader: str
    round: int
    load_s: float


def measure(scenario: Scenario, scratch: Path) -> tuple[list[MeasuredSave], list[MeasuredLoad]]:
    """Return every measured save and load but those of the warm-up."""
    size = ["--width", str(scenario.measured_width), "--rounds", str(scenario.rounds)]
    run = torchrun(["--measure", "--out", str(scratch), *size], scratch)
    run.expect_success()
    lines = run.output.splitlines()
    saves = [MeasuredSave(**json.loads(each)) for each in lines if each.startswith('{"contender"')]
    loads = [MeasuredLoad(**json.loads(each)) for each in lines if each.startswith('{"loader"')]
    return [each for each in saves if each.round > 0], [each for each in loads if each.round > 0]


def table(saves: Sequence[MeasuredSave]) -> str:
    """Lay out the median, least and most of each figure, and the medians relative to `dcp.save`."""
    by_name: dict[str, list[MeasuredSave]] = {}
    for save in saves:
        by_name.setdefault(save.contender, []).append(save)
    blocked = {name: [save.blocked_ms for save in own] for name, own in by_name.items()}
    durable = {name: [save.durable_s for save in own] for name, own in by_name.items()}
    headings = ("training blocked, ms", "x dcp.save", "durable after, s", "x dcp.save")
    rows = [("", *headings)]
    for name in sorted(by_name, key=lambda name: median(blocked[name])):
        row = (name, spread(blocked[name], 1), ratio(blocked[name], blocked["dcp.save"]))
        rows.append((*row, spread(durable[name], 2), ratio(durable[name], durable["dcp.save"])))
    return "\n".join(f"   {a:14}{b:>26}{c:>12}{d:>24}{e:>12}" for a, b, c, d, e in rows)


def load_line(loads: Sequence[MeasuredLoad]) -> str:
    """Say what a restart waits for, by either way of loading."""
    ours, stock = (
        [each.load_s for each in loads if each.loader == name]
        for name in ("nostall.load", "dcp.load")
    )
    return (
        f"   A restart loads it in {spread(ours, 2)} s with nostall.load, and in"
        f" {spread(stock, 2)} s with dcp.load: x {ratio(ours, stock)}."
    )


def spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = (f"{v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return f"{middle} ({low} - {high})"


def ratio(values: Sequence[float], baseline: Sequence[float]) -> str:
    return f"{median(values) / median(baseline):.3f}"


# --------------------------------------------------------------------------------------------------


def run_demo(scenario: Scenario, root: Path) -> None:
    """Run the four parts in turn; raise `PromiseBroken` at the first check that fails."""
    first = TrainingFiles(checkpoints=root / "first", losses=root / "first.jsonl")
    killed = TrainingFiles(checkpoints=root / "killed", losses=root / "killed.jsonl")
    resumed = TrainingFiles(checkpoints=root / "killed", losses=root / "resumed.jsonl")
    print(f"1. Train on {RANKS} ranks, with a save every {scenario.save_every} steps", flush=True)
    losses = train_without_interruption(scenario, first)
    print("2. The same, and SIGKILL in the middle of a save", flush=True)
    train_until_killed(scenario, killed, losses)
    print(f"3. Resume from the newest complete checkpoint, step {scenario.resume_at}", flush=True)
    train_resumed(scenario, resumed, losses)
    for step in (scenario.kill_at, scenario.steps):
        check_same_checkpoint(step, first, resumed)
    print("4. Save and load a larger state with nostall and with stock PyTorch", flush=True)
    saves, loads = measure(scenario, root / "measured")
    mib = median(save.nbytes for save in saves) / 2**20
    rounds = max(save.round for save in saves)
    print(f"   {mib:.0f} MiB on disk per save, half from each rank, fsynced; median (min - max) of")
    print(
        f"   {rounds} saves after a warm-up, each the slowest rank's, as many and as large as fit"
    )
    print("   into a minute; for nostall, blocked counts the call, with its snapshot, and a poll")
    print("   every 50 ms up to the commit\n")
    print(table(saves))
    print(f"\n{load_line(loads)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps and smaller saves")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(os.environ.get("TMPDIR", "/var/tmp")),
        help="where checkpoints go for a while, on a real disk (default: TMPDIR or /var/tmp, "
        "as /tmp is often memory)",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    for module, reason in (
        ("nostall", "install it first: pip install . in the repository"),
        ("numpy", "torch.distributed's object collectives need it, and so does stock dcp.save"),
    ):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"{module} is missing: {reason}")
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="nostall-demo-", dir=args.dir) as root:
            run_demo(QUICK if args.quick else FULL, Path(root))
    except PromiseBroken as broken:
        sys.exit(f"\nFAILED: {broken}")
    print(f"\nEvery promise held ({time.monotonic() - started:.0f} s).")


if __name__ == "__main__":
    main()
