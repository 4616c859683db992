"""What there is to find out on an accelerator, in one command, for the day when one is at hand.

Runs the checks of ``tests/programs/accelerator.py`` and a benchmark of state dicts on the device,
and writes one JSON file; what was found is written after every step, so that little is lost if the
machine is. Needs Linux, torch with CUDA, psutil and typing_extensions, and neither a network nor an
installation:

    python tests/stress/gpu.py --json gpu.json

The exit status is 0 if everything held, 1 if a check failed or a checkpoint was wrong, and 3
without an accelerator. ``--device cpu`` rehearses it: the same steps, of which the figures say
nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from torch.distributed.checkpoint.staging import StagingOptions

from nostall import _engine
from nostall._bench.contender import Contender, Durable, Setting, sync
from nostall._bench.limits import WRITE_SETTINGS, Limits
from nostall._bench.machine import machine_facts, versions
from nostall._bench.measure import wait_durable
from nostall._bench.options import DEFAULT_NBYTES
from nostall._bench.ours import own_contenders
from nostall._bench.quantities import parse_nbytes
from nostall._bench.ranks import joined_ranks
from nostall._bench.stock import DcpAsyncSave, DcpSave
from nostall._bench.workloads import Workload, differences, make_workload
from programs import accelerator

NO_ACCELERATOR = 3
SHAPES = ("large", "many")
MOST_S = 8 * 60
"""The whole run ends before that."""
MOST_ROUNDS = 7
WRITES = [setting for setting in WRITE_SETTINGS if setting.threads >= 4]


def main() -> int:
    given = _arguments()
    if given.device == "cuda" and not torch.cuda.is_available():
        print(
            f"no accelerator: torch {torch.__version__} finds no CUDA device; nothing was run",
            file=sys.stderr,
        )
        return NO_ACCELERATOR
    # What hangs says where, and ends.
    faulthandler.dump_traceback_later(MOST_S - 10, exit=True)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    gc.collect()
    gc.freeze()  # what was imported is not looked through before every save
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nostall-gpu-", dir=given.directory) as scratch:
        run = Run(Path(scratch), given)
        run.check_all()
        for number, shape in enumerate(SHAPES):
            rest_s = given.seconds - (time.monotonic() - started)
            run.measure(shape, for_s=rest_s / (len(SHAPES) - number))
        return run.finish(took_s=time.monotonic() - started)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--json", type=Path, default=Path("gpu.json"), help="default: %(default)s")
    add("--directory", type=Path, default=Path.cwd(), help="where to write checkpoints")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a rehearsal")
    add("--bytes", type=parse_nbytes, help="of a state dict")
    add("--seconds", type=float, default=400.0, help="when to begin nothing new")
    return parser.parse_args()


class Run:
    """One run, and all that it has found."""

    def __init__(self, scratch: Path, given: argparse.Namespace) -> None:
        self.scratch, self.device, self.given = scratch, given.device, given
        self.module = torch.get_device_module(given.device)
        self.failed = False
        self.found: dict[str, Any] = {
            "complete": False,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu, a rehearsal",
            "cuda": torch.version.cuda,
            "machine": machine_facts(scratch),
            "versions": versions(),
            "checks": {},
            "benchmarks": {},
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
        quick = self.device == "cuda"
        staging = StagingOptions(
            use_pinned_memory=quick,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=quick,
        )
        stager = DcpAsyncSave(
            "dcp.async_save pinned stager", "DefaultStager as stock sets it", staging=staging
        )
        return [*own_contenders(), DcpSave(), stager]

    def measure(self, shape: str, *, for_s: float) -> None:
        """Each contender once to verify, then rounds in turns until time is over, at least one."""
        until = time.monotonic() + for_s
        workload = self.workload(shape)
        limits = DeviceLimits(workload.nbytes, self.device)
        rows: dict[str, dict[str, Any]] = {}
        found = {
            "nbytes": workload.nbytes,
            "tensors": len(workload.tensors),
            "limits": limits.samples,
            "contenders": rows,
        }
        self.found["benchmarks"][shape] = found
        contenders = self.contenders()
        for contender in contenders:
            rows[contender.name] = {"blocked_s": [], "durable_s": [], "wrong": None, "error": None}
            with self._part_of(rows[contender.name]):
                self._prepare(contender, workload, rows[contender.name])
            self.store()
        for number in range(MOST_ROUNDS):
            if number and time.monotonic() > until:
                break
            with self.directory() as path:
                limits.measure(path)
            for contender in contenders:
                row = rows[contender.name]
                if row["error"] is None:
                    with self._part_of(row):
                        blocked_s, durable_s = self._save(contender, workload)
                        row["blocked_s"].append(blocked_s)
                        row["durable_s"].append(durable_s)
            found["ratios"] = _ratios(rows, limits)
            self.store()
        for contender in contenders:
            with self._part_of(rows[contender.name]):
                contender.close()
        _engine.reset()
        self._say(shape, rows, limits)

    def _prepare(self, contender: Contender, workload: Workload, row: dict[str, Any]) -> None:
        """Let a contender save as often as its caches need, and verify the last save."""
        with self.directory() as path, joined_ranks() as ranks:
            contender.open(Setting(ranks=ranks, nbytes=workload.nbytes, scratch=path))
        for _ in range(contender.warmups - 1):
            self._save(contender, workload)
        row["wrong"] = self._differences(contender, workload)
        self.failed |= bool(row["wrong"])

    def workload(self, shape: str) -> Workload:
        nbytes = self.given.bytes or DEFAULT_NBYTES[shape]
        on_host = make_workload(shape, nbytes, rank=0, world_size=1).state
        return Workload(shape, {name: each.to(self.device) for name, each in on_host.items()})

    @contextmanager
    def _part_of(self, row: dict[str, Any]) -> Iterator[None]:
        """What a contender fails with is its result."""
        try:
            yield
        except Exception as error:  # whatever it is
            row["error"] = f"{type(error).__name__}: {error}"
            self.failed = True
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
            blocked_s += 0.0 if isinstance(pending, Durable) else wait_durable(pending)
            return blocked_s, time.perf_counter() - started

    def _differences(self, contender: Contender, workload: Workload) -> list[str]:
        """What differs in a checkpoint from the call, although everything changed when allowed."""
        workload.advance()
        version = workload.version
        with self.directory() as path:
            pending = contender.save(workload.state, path / "save")
            pending.wait_staged()
            workload.advance()
            wait_durable(pending)
            workload.set_version(version)
            loaded = contender.load(path / "save", workload.blank())
            return differences(workload.state, loaded)

    def _say(self, shape: str, rows: dict[str, dict[str, Any]], limits: DeviceLimits) -> None:
        gigabytes = limits.nbytes / 1e9
        print(
            f"{shape}: {gigabytes:.2f} GB; copy to pinned memory {limits.copy_s * 1e3:.1f} ms,"
            f" raw write {limits.write_s:.3f} s"
        )
        for name, row in rows.items():
            if row["error"] is None:
                blocked, durable = (
                    statistics.median(row[key]) for key in ("blocked_s", "durable_s")
                )
                verdict = "WRONG" if row["wrong"] else "same"
                print(
                    f"  {name:30} blocked {blocked * 1e3:8.1f} ms {blocked / limits.copy_s:6.2f},"
                    f" durable {durable:7.3f} s {durable / limits.write_s:6.2f}, {verdict}"
                )
            else:
                print(f"  {name:30} {row['error']:.100}")


class DeviceLimits:
    """What the machine can do at best with so many bytes: copy them off, and write them."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        self.samples: dict[str, Any] = {
            "pinned_copy_s": [],
            "raw_write_s": {str(setting): [] for setting in WRITES},
            "direct": True,
        }
        self._module = torch.get_device_module(device)
        self._on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
        self._pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
        self._files = Limits([torch.zeros(nbytes, dtype=torch.uint8)])

    def measure(self, directory: Path) -> None:
        self.samples["pinned_copy_s"].append(min(self._copied_s() for _ in range(3)))
        for setting in WRITES:
            path = directory / "raw"
            wrote = self._files.raw_write(path, setting)
            path.unlink()
            sync(directory)
            self.samples["raw_write_s"][str(setting)].append(wrote.seconds)
            self.samples["direct"] &= wrote.direct

    def _copied_s(self) -> float:
        self._module.synchronize()
        started = time.perf_counter()
        self._pinned.copy_(self._on_device, non_blocking=True)
        self._module.synchronize()
        return time.perf_counter() - started

    @property
    def copy_s(self) -> float:
        """The median copy."""
        return float(statistics.median(self.samples["pinned_copy_s"]))

    @property
    def write_s(self) -> float:
        """The median of the fastest way to write."""
        ways = self.samples["raw_write_s"].values()
        return min(map(statistics.median, ways), default=math.nan)


def _ratios(rows: dict[str, dict[str, Any]], limits: DeviceLimits) -> dict[str, dict[str, float]]:
    """Medians of every contender over the limits."""
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
