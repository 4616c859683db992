"""Check and measure nostall on an accelerator, in one command, for the day when one is at hand.

Runs the checks of ``tests/programs/accelerator.py`` and a benchmark of state dicts on the device,
and writes one JSON file; what was found is written after every step, so that little is lost if the
machine is. Needs Linux, torch with CUDA, psutil and typing_extensions, and neither a network nor an
installation:

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
import math
import resource
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender, DcpAsyncSave, Pending, all_contenders, staging
from benchmarks.group import Group
from benchmarks.limits import RawWrites, fast_pages
from benchmarks.loads import LoadContender, load_contenders
from benchmarks.machine import bring_in, facts, files_below, sync, versions
from benchmarks.saves import wait_durable
from benchmarks.workloads import DEFAULT_MIB, SHAPES, Workload, differences, make_workload
from nostall import _engine
from programs import accelerator

NO_ACCELERATOR = 3
MOST_S = 8 * 60
"""The whole run ends before that."""
MOST_ROUNDS = 7
TRAINING_ROUNDS = 5


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
        parts = [*product(given.shapes, (run.measure, run.measure_loads))]
        for number, (shape, measure) in enumerate(parts):
            rest_s = given.seconds - (time.monotonic() - started)
            measure(shape, for_s=rest_s / (len(parts) - number))
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
    def __init__(self, scratch: Path, given: argparse.Namespace) -> None:
        self.scratch, self.device, self.given = scratch, given.device, given
        self.module = torch.get_device_module(given.device)
        self.failed = False
        self.found: dict[str, Any] = {
            "complete": False,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu, a rehearsal",
            "cuda": torch.version.cuda,
            "machine": facts(scratch),
            "versions": versions(),
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

    # --- checks -----------------------------------------------------------------------------------

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

    # --- benchmark --------------------------------------------------------------------------------

    def contenders(self) -> list[Contender]:
        options = staging(shared=True, pinned=self.device == "cuda")  # as stock sets them
        stager = DcpAsyncSave("dcp.async_save pinned stager", staging=options)
        known = [each for each in all_contenders() if not each.name.startswith("dcp.async")]
        return [each for each in (*known, stager) if each.available() is None]

    def measure(self, shape: str, *, for_s: float) -> None:
        """Each contender once to verify, then rounds in turns until time is over, at least one.

        Half of the time is for stretches of training, in turns, too, at least one.
        """
        with alone(self.device) as group:
            self._measure(shape, group, for_s)

    def _measure(self, shape: str, group: Group, for_s: float) -> None:
        until = time.monotonic() + for_s
        rounds_until = until - for_s / 2 if shape == "large" else until
        workload = self.workload(shape)
        limits = DeviceLimits(workload.nbytes, self.device)
        rows: dict[str, dict[str, Any]] = {}
        found: dict[str, Any] = {"nbytes": workload.nbytes, "tensors": len(workload.tensors)}
        found |= {"limits": limits.samples, "contenders": rows}
        self.found["benchmarks"][shape] = found
        contenders = self.contenders()
        for contender in contenders:
            rows[contender.name] = {"blocked_s": [], "durable_s": [], "wrong": None, "error": None}
            with self._part_of(contender.name, rows):
                self._prepare(contender, group, workload, rows[contender.name])
            self.store()
        for number in range(MOST_ROUNDS):
            if number and time.monotonic() > rounds_until:
                break
            with self.directory() as path:
                limits.measure(path)
            for contender in contenders:
                row = rows[contender.name]
                if row["error"] is None:
                    with self._part_of(contender.name, rows):
                        blocked_s, durable_s = self._save(contender, workload)
                        row["blocked_s"].append(blocked_s)
                        row["durable_s"].append(durable_s)
            found["ratios"] = _ratios(rows, limits)
            self.store()
        if shape == "large":
            self._train(contenders, workload, rows, until)
        for contender in contenders:
            with self._part_of(contender.name, rows):
                contender.close()
        _engine.reset()

        def said(row: dict[str, Any]) -> str:
            blocked, durable = (statistics.median(row[key]) for key in ("blocked_s", "durable_s"))
            return (
                f"blocked {blocked * 1e3:8.1f} ms {blocked / limits.copy_s:6.2f},"
                f" durable {durable:7.3f} s {durable / limits.write_s:6.2f}"
                f"{_said_of_training(row)}"
            )

        pinned = f"copy to pinned memory {limits.copy_s * 1e3:.1f} ms"
        size = f"{limits.nbytes / 1e9:.2f} GB; {pinned}, raw write {limits.write_s:.3f} s"
        _say(f"{shape}: {size}", rows, said)

    def _train(
        self,
        contenders: list[Contender],
        workload: Workload,
        rows: dict[str, dict[str, Any]],
        until: float,
    ) -> None:
        """By how much longer a stretch of training takes with a save at its beginning, in turns."""
        steps = Steps(self.device, workload)
        steps.run(None)
        for number in range(TRAINING_ROUNDS):
            if number and time.monotonic() > until:
                break
            for contender in contenders:
                row = rows[contender.name]
                if row["error"] is None:
                    with self._part_of(contender.name, rows), self.directory() as path:
                        gc.collect()
                        without_s = steps.run(None)
                        with_s = steps.run(lambda: contender.save(workload.state, path / "save"))  # noqa: B023  # called at once
                        row.setdefault("training_s", []).append((without_s, with_s))
            self.store()

    def measure_loads(self, shape: str, *, for_s: float) -> None:
        """Loads from the page cache into tensors of the device, in turns, at least one round."""
        until = time.monotonic() + for_s
        workload = self.workload(shape)
        upload_s: list[float] = []
        rows: dict[str, dict[str, Any]] = {}
        found = {"nbytes": workload.nbytes, "pinned_copy_s": upload_s, "contenders": rows}
        self.found["loads"][shape] = found
        limits = DeviceLimits(workload.nbytes, self.device)
        with self.directory() as path:
            contenders = [each for each in load_contenders() if not each.available()]
            for contender in contenders:
                row = rows[contender.name] = {"load_s": [], "wrong": None, "error": None}
                with self._part_of(contender.name, rows):
                    files = path / contender.write.__name__
                    if not files.exists():
                        contender.write(workload.state, files)
                    row["wrong"] = self._wrongly_loaded(contender, workload, files)
                    self.failed |= bool(row["wrong"])
            bring_in(files_below(path))
            for number in range(MOST_ROUNDS):
                if number and time.monotonic() > until:
                    break
                upload_s.append(min(limits.uploaded_s() for _ in range(3)))
                for contender in contenders:
                    row = rows[contender.name]
                    if row["error"] is None:
                        with self._part_of(contender.name, rows):
                            files = path / contender.write.__name__
                            row["load_s"].append(self._loaded_s(contender, workload, files))
                self.store()
        copy_s = statistics.median(upload_s)

        def said(row: dict[str, Any]) -> str:
            took_s = statistics.median(row["load_s"])
            return f"{took_s * 1e3:8.1f} ms {took_s / copy_s:6.2f}"

        size = f"{workload.nbytes / 1e9:.2f} GB; copy from pinned memory {copy_s * 1e3:.1f} ms"
        _say(f"loads of {shape}: {size}", rows, said)

    def _wrongly_loaded(
        self, contender: LoadContender, workload: Workload, path: Path
    ) -> list[str]:
        """Names of tensors that differ after a load into other values."""
        into = workload.blank()
        contender.load(into, path)
        self.module.synchronize()
        return differences(workload.state, into)

    def _loaded_s(self, contender: LoadContender, workload: Workload, path: Path) -> float:
        """Seconds until the values are on the device."""
        gc.collect()
        self.module.synchronize()
        started = time.perf_counter()
        contender.load(dict(workload.state), path)
        self.module.synchronize()
        return time.perf_counter() - started

    def _prepare(
        self, contender: Contender, group: Group, workload: Workload, row: dict[str, Any]
    ) -> None:
        """Let a contender save as often as its caches need, and verify the last save."""
        with self.directory() as path:
            contender.open(group, workload.nbytes, path)
        for _ in range(contender.warmups - 1):
            self._save(contender, workload)
        row["wrong"] = self._differences(contender, workload)
        self.failed |= bool(row["wrong"])

    def workload(self, shape: str) -> Workload:
        nbytes = self.given.bytes or int(DEFAULT_MIB[shape] * 2**20)
        on_host = make_workload(shape, nbytes).state
        return Workload(shape, {name: each.to(self.device) for name, each in on_host.items()})

    @contextmanager
    def _part_of(self, name: str, rows: dict[str, dict[str, Any]]) -> Iterator[None]:
        """Record a contender's exception as its result."""
        try:
            yield
        except Exception as error:  # whatever it is
            rows[name]["error"] = f"{type(error).__name__}: {error}"
            self.failed |= name.startswith("nostall")
            traceback.print_exc()

    def _save(self, contender: Contender, workload: Workload) -> tuple[float, float]:
        """Seconds for which a save blocks, and until it is durable."""
        workload.advance()
        gc.collect()
        self.module.synchronize()
        with self.directory() as path:
            started = time.perf_counter()
            pending = contender.save(workload.state, path / "save")
            blocked_s = time.perf_counter() - started
            blocked_s += wait_durable(pending)
            return blocked_s, time.perf_counter() - started

    def _differences(self, contender: Contender, workload: Workload) -> list[str]:
        """Names whose saved values differ from the call, although all changed when allowed."""
        workload.advance()
        version = workload.version
        with self.directory() as path:
            pending = contender.save(workload.state, path / "save")
            if pending is not None:
                pending.wait_staged()
            workload.advance()
            wait_durable(pending)
            workload.set_version(version)
            loaded = contender.load(path / "save", workload.blank())
            return differences(workload.state, loaded)


def _say(
    title: str, rows: dict[str, dict[str, Any]], said: Callable[[dict[str, Any]], str]
) -> None:
    print(title)
    for name, row in rows.items():
        verdict = "WRONG" if row["wrong"] else "same"
        print(f"  {name:30} {row['error'] or f'{verdict}: {said(row)}':.250}")


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


def _said_of_training(row: dict[str, Any]) -> str:
    trained = row.get("training_s")
    if not trained:
        return ""
    longer_s = statistics.median(with_s - without_s for without_s, with_s in trained)
    step_s = statistics.median(without_s for without_s, _ in trained)
    return f"; training of {step_s * 1e3:.0f} ms takes {longer_s * 1e3:.1f} ms longer"


class DeviceLimits:
    """The machine's limits for so many bytes: copies off the device, and writes."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        self.samples: dict[str, Any] = {"pinned_copy_s": [], "raw_write_s": {}}
        self._module = torch.get_device_module(device)
        self._on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
        self._pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
        pages = fast_pages(nbytes)
        torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        self._writes = RawWrites(pages, nbytes)

    def measure(self, directory: Path) -> None:
        copied_s = (self._took_s(self._pinned, self._on_device) for _ in range(3))
        self.samples["pinned_copy_s"].append(min(copied_s))
        wrote = self._writes.measure(directory / "raw", lambda: sync(directory))
        for setting, seconds in wrote.items():
            self.samples["raw_write_s"].setdefault(setting, []).append(seconds)

    def uploaded_s(self) -> float:
        """Seconds of one copy of all bytes from pinned memory onto the device."""
        return self._took_s(self._on_device, self._pinned)

    def _took_s(self, into: torch.Tensor, source: torch.Tensor) -> float:
        self._module.synchronize()
        started = time.perf_counter()
        into.copy_(source, non_blocking=True)
        self._module.synchronize()
        return time.perf_counter() - started

    @property
    def copy_s(self) -> float:
        return float(statistics.median(self.samples["pinned_copy_s"]))

    @property
    def write_s(self) -> float:
        """The median of the fastest way to write."""
        ways = self.samples["raw_write_s"].values()
        return min(map(statistics.median, ways), default=math.nan)


def _ratios(rows: dict[str, dict[str, Any]], limits: DeviceLimits) -> dict[str, dict[str, float]]:
    return {
        name: {
            "blocked / pinned copy": statistics.median(row["blocked_s"]) / limits.copy_s,
            "durable / raw write": statistics.median(row["durable_s"]) / limits.write_s,
        }
        for name, row in rows.items()
        if row["durable_s"]
    }


if __name__ == "__main__":
    sys.exit(main())
