"""Feed hostile input to everything that reads: metadata, shards and manifests.

    python tests/stress/fuzz.py --inputs 1000000 --seed 1
    python tests/stress/fuzz.py --replay findings/metadata-1-4711

Input number ``n`` of a target follows from the seed, the target's name and ``n`` alone. It runs in
a child process under limits (:mod:`fuzz_oracles`); a child that dies or does not get on is a
finding, too. What inputs came to is counted, so that a target whose inputs all bounce off the first
check is seen. Exit status 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from stress import fuzz_reads, fuzz_targets
from stress.fuzz_oracles import Finding, Judge

BATCH = 10_000
DEADLINE_S = 10.0
"""For one input, by the clock, on a busy machine; the slowest one is reported."""
_SLOT_NBYTES = 8
_IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None

Targets = Mapping[str, fuzz_targets.Target]


@dataclass(slots=True)
class Tally:
    """Counts, times, outcomes and findings of one target's inputs."""

    inputs: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Path] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    name: str
    seed: int
    begin: int
    end: int

    def content(self, target: fuzz_targets.Target, number: int) -> bytes:
        return target.make(random.Random(f"{self.seed}/{self.name}/{number}"))


# --- a child --------------------------------------------------------------------------------------


def _serve(
    make: Callable[[str], fuzz_targets.Target], batch: Batch, root: str, at: mmap.mmap, tell: int
) -> NoReturn:
    """Run a batch up to its first finding, report it and end, whatever is left undone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        target = make(root)
        judge = Judge(root, may_waste=target.runs_pickles)
        finding, slowest_s, number = None, 0.0, batch.begin
        for number in range(batch.begin, batch.end):
            at[:_SLOT_NBYTES] = number.to_bytes(_SLOT_NBYTES, "little")
            content = batch.content(target, number)
            target.prepare(content)
            started_s = time.perf_counter()
            finding = judge.judge(target.run, content)
            slowest_s = max(slowest_s, time.perf_counter() - started_s)
            if finding is not None:
                break
        told = {
            "outcomes": judge.outcomes,
            "slowest_s": slowest_s,
            "finding": None if finding is None else asdict(finding),
            "number": number,
        }
        with open(tell, "w", encoding="ascii") as stream:
            json.dump(told, stream)
    except BaseException:  # the fuzzer's own; seen as a child that died
        traceback.print_exc()
    finally:
        os._exit(0)


# --- the driver -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Runs batches in children and keeps what they find."""

    findings: Path
    deadline_s: float = DEADLINE_S
    most_findings: int = 20
    """Findings after which a target counts as broken; every one costs a child."""
    makers: Mapping[str, Callable[[str], fuzz_targets.Target]] = field(
        default_factory=lambda: fuzz_targets.MAKERS
    )

    def run(self, name: str, seed: int, inputs: int) -> Tally:
        fuzz_targets.corpus()  # by this process, so that it is the same for all children
        fuzz_reads.checkpoints()
        tally, begin, started_s = Tally(), 0, time.monotonic()
        while begin < inputs and len(tally.findings) < self.most_findings:
            batch = Batch(name=name, seed=seed, begin=begin, end=min(inputs, begin + BATCH))
            begin = self._feed(batch, tally)
        tally.inputs, tally.seconds = begin, time.monotonic() - started_s
        return tally

    def _feed(self, batch: Batch, tally: Tally) -> int:
        """Run a batch, or the part of it up to a finding; returns the number of the next input."""
        told, finding, number = self._in_child(batch)
        tally.outcomes.update(told.get("outcomes", {}))
        tally.slowest_s = max(tally.slowest_s, told.get("slowest_s", 0.0))
        if finding is not None:
            tally.findings.append(self._keep(batch, number, finding))
        return number + 1

    def _in_child(self, batch: Batch) -> tuple[dict[str, Any], Finding | None, int]:
        at = mmap.mmap(-1, _SLOT_NBYTES)
        at[:_SLOT_NBYTES] = batch.begin.to_bytes(_SLOT_NBYTES, "little")
        ours, theirs = os.pipe()
        with tempfile.TemporaryDirectory(dir=_IN_MEMORY) as root:
            pid = os.fork()
            if pid == 0:
                os.close(ours)
                _serve(self.makers[batch.name], batch, root, at, theirs)
            os.close(theirs)
            said, hung = self._listen(ours, at, pid)
            _, status = os.waitpid(pid, 0)
        number = int.from_bytes(at[:_SLOT_NBYTES], "little")
        if hung:
            what = f"not done after {self.deadline_s} s"
            return {}, Finding(kind="hang", what=what), number
        if not said:
            code = os.waitstatus_to_exitcode(status)
            return {}, Finding(kind="crash", what=f"the process ended with {code}"), number
        told = json.loads(said)
        finding = None if told["finding"] is None else Finding(**told["finding"])
        return told, finding, told["number"]

    def _listen(self, fd: int, at: mmap.mmap, pid: int) -> tuple[bytes, bool]:
        """The output of a child until it ends, and whether it had to be killed."""
        said, last, since_s = b"", bytes(at), time.monotonic()
        with open(fd, "rb", buffering=0) as stream:
            while True:
                if select.select([stream], [], [], self.deadline_s / 10)[0]:
                    piece = stream.read(1 << 16)
                    if not piece:
                        return said, False
                    said += piece
                if bytes(at) != last:
                    last, since_s = bytes(at), time.monotonic()
                elif time.monotonic() - since_s > self.deadline_s:
                    os.kill(pid, signal.SIGKILL)
                    return b"", True

    def _keep(self, batch: Batch, number: int, finding: Finding) -> Path:
        self.findings.mkdir(parents=True, exist_ok=True)
        path = self.findings / f"{batch.name}-{batch.seed}-{number}"
        header = {"target": batch.name, "seed": batch.seed, "number": number, **asdict(finding)}
        with tempfile.TemporaryDirectory(dir=_IN_MEMORY) as root:
            content = batch.content(self.makers[batch.name](root), number)
        path.write_bytes(json.dumps(header).encode() + b"\n" + content)
        return path

    def replay(self, path: Path) -> Finding | None:
        header, content = path.read_bytes().split(b"\n", 1)
        name = json.loads(header)["target"]
        makers = {name: lambda root: _Fixed(self.makers[name](root), content)}
        again = Driver(findings=self.findings, deadline_s=self.deadline_s, makers=makers)
        return again._in_child(Batch(name=name, seed=0, begin=0, end=1))[1]


class _Fixed:
    """A target with one input only."""

    def __init__(self, target: fuzz_targets.Target, content: bytes) -> None:
        self._content = content
        self.prepare, self.run = target.prepare, target.run
        self.runs_pickles = target.runs_pickles

    def make(self, chance: random.Random) -> bytes:
        return self._content


SHARES = {"metadata": 0.35, "container": 0.03, "manifest": 0.34, "index": 0.25, "reads": 0.03}
"""Shares of all inputs; a shard file takes several times as long as the others, a load more."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Feed hostile input to everything that reads.")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=SHARES, help="only this one")
    parser.add_argument("--findings", type=Path, default=Path("findings"))
    parser.add_argument("--replay", type=Path, help="run the input of a finding again")
    arguments = parser.parse_args()
    driver = Driver(findings=arguments.findings)
    if arguments.replay is not None:
        finding = driver.replay(arguments.replay)
        print("nothing is wrong" if finding is None else f"{finding.kind}: {finding.what}")
        return int(finding is not None)
    found = 0
    for name, share in SHARES.items():
        if arguments.target not in (None, name):
            continue
        count = round(arguments.inputs * (share if arguments.target is None else 1))
        tally = driver.run(name, arguments.seed, count)
        found += len(tally.findings)
        print(
            f"{name}: {tally.inputs} inputs in {tally.seconds:.0f} s, slowest"
            f" {tally.slowest_s:.2f} s, {len(tally.findings)} findings",
            flush=True,
        )
        for outcome, times in tally.outcomes.most_common():
            print(f"  {times:9d} {outcome}")
        for path in tally.findings:
            print(f"  finding: {path}: {path.read_bytes().split(bytes([10]), 1)[0].decode()}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
