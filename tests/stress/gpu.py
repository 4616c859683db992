"""Check and measure nostall on an accelerator, in one command, for the day when one is at hand.

Runs the checks of ``tests/programs/accelerator.py`` and a benchmark of state dicts on the device,
and writes one JSON file, anew after each check and each part of the benchmark, so that little is
lost if the machine is. Needs Linux, torch with CUDA, psutil and typing_extensions, and neither a
network nor an installation:

    python tests/stress/gpu.py --json gpu.json

The exit status is 0 if everything held, 1 if a check or nostall failed or a checkpoint was wrong,
and 3 without an accelerator. What a peer fails with is its result. ``--device cpu`` rehearses it:
the same steps, of which the figures say nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import torch.distributed as dist

import nostall
from benchmarks.contenders import Contender, DcpAsyncSave, Pending, all_contenders, staging
from benchmarks.group import Group
from benchmarks.limits import RawWrites, fast_pages
from benchmarks.loads import LoadContender, Loads, load_contenders, measure_loads
from benchmarks.machine import bring_in, facts, files_below, sync, versions
from benchmarks.report import Column, Report, Sample, rendered
from benchmarks.saves import Saves, measure_saves, wait_durable
from benchmarks.workloads import DEFAULT_MIB, SHAPES, State, Workload, make_workload
from nostall import _engine
from programs import accelerator

NO_ACCELERATOR = 3
MOST_S = 8 * 60
"""The whole run ends before that."""
MOST_ROUNDS = 7
SAVES = (
    Column("blocked ms", "blocked_s", 1e3),
    Column("/ pinned copy", "blocked_s", digits=2, over="pinned copy"),
    Column("durable s", "durable_s", digits=3),
    Column("/ raw write", "durable_s", digits=2, over="raw write"),
    Column("training longer, ms", "longer_s", 1e3),
)
LOADS = (
    Column("ms", "warm_s", 1e3),
    Column("/ pinned copy", "warm_s", digits=2, over="pinned copy"),
)


def main() -> int:
    given = _arguments()
    if given.device == "cuda" and not torch.cuda.is_available():
        print(
            f"no accelerator: torch {torch.__version__} finds no CUDA device; nothing was run",
            file=sys.stderr,
        )
        return NO_ACCELERATOR
    # Stock's stager in shared memory keeps a descriptor for every tensor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # What hangs says where, and ends.
    faulthandler.dump_traceback_later(MOST_S - 10, exit=True)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    gc.collect()
    gc.freeze()  # what was imported is not looked through before every save
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nostall-gpu-", dir=given.directory) as scratch:
        run = Run(Path(scratch), given)
        run.check_all()
        parts = [
            part
            for shape in given.shapes
            for part in ((run.measure, shape), (run.measure_loads, shape))
        ]
        for number, (measure, shape) in enumerate(parts):
            now = time.monotonic()
            rest_s = given.seconds - (now - started)
            measure(shape, until_s=now + rest_s / (len(parts) - number))
        return run.finish(took_s=time.monotonic() - started)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--json", type=Path, default=Path("gpu.json"), help="default: %(default)s")
    add("--directory", type=Path, default=Path.cwd(), help="where to write checkpoints")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a rehearsal")
    add("--shapes", nargs="+", choices=SHAPES, default=SHAPES, help="default: all")
    add("--bytes", type=int, help="of a state dict")
    add("--seconds", type=float, default=400.0, help="when to begin nothing new")
    return parser.parse_args()


@contextmanager
def alone(device: str) -> Iterator[Group]:
    """A process group of this rank only: NVRx saves in no other way, and every job has a group."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Group(0, 1, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


class Run:
    """One run, and all that it has found."""

    def __init__(self, scratch: Path, given: argparse.Namespace) -> None:
        self.scratch, self.device, self.given = scratch, given.device, given
        self.failed = False
        self.about: dict[str, Any] = {
            "options": {"device": given.device, "seconds": given.seconds},
            "machine": facts(scratch),
            "versions": versions(),
        }
        self.found: dict[str, Any] = {
            "complete": False,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu, a rehearsal",
            "cuda": torch.version.cuda,
            "checks": {},
            "benchmarks": {},
            "loads": {},
        }

    def store(self) -> None:
        self.given.json.write_text(json.dumps(self.found, indent=1) + "\n")

    def finish(self, *, took_s: float) -> int:
        self.found |= {"complete": True, "took_s": round(took_s, 1)}
        self.store()
        print(f"{'FAILED' if self.failed else 'passed'} in {took_s:.0f} s: {self.given.json}")
        return int(self.failed)

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """A directory that is removed afterwards, and that synced."""
        path = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            sync(self.scratch)

    def check_all(self) -> None:
        chosen = accelerator.ANYWHERE + (accelerator.WITH_CUDA if self.device == "cuda" else ())
        for check in chosen:
            started, failure = time.monotonic(), None
            with self.directory() as path:
                try:
                    check(path, self.device)
                except Exception:  # told at the end; the others are run all the same
                    failure, self.failed = traceback.format_exc(), True
                    traceback.print_exc()
            _engine.reset()
            seconds = round(time.monotonic() - started, 2)
            self.found["checks"][check.__name__] = {"failure": failure, "seconds": seconds}
            print(f"{'FAILED' if failure else 'passed'} {seconds:6.1f} s  {check.__name__}")
            self.store()

    def measure(self, shape: str, *, until_s: float) -> None:
        """Saves by all contenders, and what they cost a stretch of training; at least one round."""
        with alone(self.device) as group, self.directory() as path:
            saves = DeviceSaves(self.workload(shape), path, group, self.device)
            contenders = contenders_on(self.device)
            report = measure_saves(saves, contenders, limits=saves.limits, **self.rounds(until_s))
        self.take("benchmarks", shape, report, SAVES)

    def measure_loads(self, shape: str, *, until_s: float) -> None:
        """Loads from the page cache into tensors of the device, at least one round."""
        with self.directory() as path:
            loads = DeviceLoads(self.workload(shape), path, self.device)
            contenders = [loads.awaited(each) for each in load_contenders()]
            report = measure_loads(loads, contenders, **self.rounds(until_s))
        self.take("loads", shape, report, LOADS)

    def rounds(self, until_s: float) -> dict[str, Any]:
        return {"rounds": MOST_ROUNDS, "until_s": until_s}

    def workload(self, shape: str) -> Workload:
        nbytes = self.given.bytes or int(DEFAULT_MIB[shape] * 2**20)
        on_host = make_workload(shape, nbytes).state
        return Workload(shape, {name: each.to(self.device) for name, each in on_host.items()})

    def take(self, kind: str, shape: str, report: Report, columns: Sequence[Column]) -> None:
        """Show and store a report; what a peer fails with is its result."""
        report.about = self.about
        self.failed |= report.failed or any(
            row.status == "FAILED" for row in report.contenders if row.name.startswith("nostall")
        )
        self.found[kind][shape] = asdict(report)
        self.store()
        print(rendered(report, columns, f"{kind} of {shape}: median [quartiles] of the rounds\n"))


def contenders_on(device: str) -> list[Contender]:
    """Everybody, with stock's stager set as stock sets it."""
    options = staging(shared=True, pinned=device == "cuda")
    stager = DcpAsyncSave("dcp.async_save pinned stager", staging=options)
    return [*(each for each in all_contenders() if not each.name.startswith("dcp.async")), stager]


class DeviceSaves(Saves):
    """Saves of a state on a device, each after all that was queued there; and training."""

    def __init__(self, workload: Workload, directory: Path, group: Group, device: str) -> None:
        super().__init__(workload, directory, group)
        self._limits = DeviceLimits(workload.nbytes, device)
        self._steps = Steps(device, workload) if workload.shape == "large" else None
        if self._steps is not None:
            self._steps.run(None)

    def warm(self) -> None:
        gc.collect()
        self._limits.synchronize()

    def limits(self) -> Sample:
        """Copies off the device, and writes, of as many bytes as a save."""
        with self.fresh() as path:
            return {**self._limits.copied(), **self._limits.written(path, self.directory)}

    def timed(self, contender: Contender, path: Path) -> Sample:
        """And by how much longer a stretch of training takes with a save at its beginning."""
        path.mkdir()
        sample = super().timed(contender, path / "save")
        if self._steps is not None:
            gc.collect()
            without_s = self._steps.run(None)
            with_s = self._steps.run(
                lambda: contender.save(self.workload.state, path / "in training")
            )
            sample["longer_s"] = with_s - without_s
        return sample

    def untimed(self, contender: Contender, path: Path) -> Sample:
        super().timed(contender, path)
        return {}


class DeviceLoads(Loads):
    """Loads into tensors of a device, from files that are in the page cache."""

    def __init__(self, workload: Workload, directory: Path, device: str) -> None:
        super().__init__(workload, directory)
        self._limits = DeviceLimits(workload.nbytes, device)

    def prepare(self, path: Path, *, cold: bool) -> float:
        bring_in(files_below(path))
        nostall.CachedMetadataFileSystemReader.clear_metadata_cache()
        gc.collect()
        self._limits.synchronize()
        return 1.0

    def awaited(self, contender: LoadContender) -> LoadContender:
        """The contender, which is done when the values are on the device."""

        def load(into: State, path: Path) -> None:
            contender.load(into, path)
            self._limits.synchronize()

        return replace(contender, load=load)

    def limits(self) -> tuple[Callable[[], Sample], ...]:
        """A function that measures copies onto the device; nothing is loaded cold."""
        return (self._limits.uploaded,)


class Steps:
    """A stretch of training: products of matrices, then a change of every element in each step."""

    def __init__(self, device: str, workload: Workload) -> None:
        width, self._count = (8192, 60) if device == "cuda" else (64, 6)
        self._left = torch.randn(width, width, device=device, dtype=torch.bfloat16)
        self._right = torch.randn(width, width, device=device, dtype=torch.bfloat16)
        self._workload = workload

    def run(self, save: Callable[[], Pending | None] | None) -> float:
        """Seconds that the steps take; what is still to be written afterwards does not count."""
        started, pending = time.perf_counter(), None if save is None else save()
        done = pending is None
        for _ in range(self._count):
            products = [self._left @ self._right for _ in range(10)]
            if pending is not None:
                pending.wait_staged()
            self._workload.advance()
            products[-1][0, 0].item()  # as a loop does that looks at its loss
            if pending is not None and not done:
                done = pending.poll()
        took_s = time.perf_counter() - started
        if pending is not None and not done:
            wait_durable(pending)
        return took_s


class DeviceLimits:
    """The machine's limits for so many bytes: copies off the device and onto it, and writes."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.synchronize: Callable[[], None] = torch.get_device_module(device).synchronize
        self._on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
        self._pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
        pages = fast_pages(nbytes)
        torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        self._writes = RawWrites(pages, nbytes)

    def copied(self) -> Sample:
        """The fastest of three copies into pinned memory."""
        return self._fastest(self._pinned, self._on_device)

    def uploaded(self) -> Sample:
        """The fastest of three copies from pinned memory."""
        return self._fastest(self._on_device, self._pinned)

    def written(self, path: Path, directory: Path) -> Sample:
        """Raw writes of each setting, when nothing else is to be written."""
        return self._writes.measure(path, lambda: sync(directory))

    def _fastest(self, into: torch.Tensor, source: torch.Tensor) -> Sample:
        return {"pinned copy_s": min(self._took_s(into, source) for _ in range(3))}

    def _took_s(self, into: torch.Tensor, source: torch.Tensor) -> float:
        self.synchronize()
        started = time.perf_counter()
        into.copy_(source, non_blocking=True)
        self.synchronize()
        return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
