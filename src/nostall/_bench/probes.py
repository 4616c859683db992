"""Figures of nostall that no save shows: its writer's start and size, and its import."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from nostall._bench.processes import lone_environment
from nostall._bench.results import FirstSaves, ProbeReport
from nostall._engine import Engine

_REPETITIONS = 5
_FRESH_PROCESSES = 3
_SAVES_IN_EACH = 7
_TIMEOUT_S = 600.0


def probe(shape: str, nbytes: int, directory: Path) -> ProbeReport:
    """All of them; on one rank, while nothing else runs."""
    started = [_writer_start() for _ in range(_REPETITIONS)]
    return ProbeReport(
        writer_start_s=tuple(seconds for seconds, _ in started),
        writer_resident_nbytes=tuple(nbytes for _, nbytes in started),
        import_s=_import_s(),
        first_saves=tuple(
            _first_saves(shape, nbytes, directory, contender, warmed_up=warmed_up)
            for _ in range(_FRESH_PROCESSES)
            for contender in ("nostall", "nostall dcp.async_save")
            for warmed_up in (True, False)
        ),
    )


def _writer_start() -> tuple[float, int]:
    """Seconds until a new writer process is ready, and its resident bytes then."""
    engine = Engine()
    try:
        started = time.perf_counter()
        writer = engine.writers(1)[0]
        if not writer.wait_ready(_TIMEOUT_S):
            raise RuntimeError("the writer process did not start; its standard error says why")
        seconds = time.perf_counter() - started
        return seconds, psutil.Process(writer.pid).memory_info().rss
    finally:
        engine.close()


def _import_s() -> tuple[float, ...]:
    """What ``import nostall`` adds to a bare interpreter, in turns with it."""
    samples = []
    for _ in range(_REPETITIONS):
        bare_s = _interpreter_s("pass")
        samples.append(_interpreter_s("import nostall") - bare_s)
    return tuple(samples)


def _interpreter_s(program: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], env=lone_environment(), check=True)
    return time.perf_counter() - started


def _first_saves(
    shape: str, nbytes: int, directory: Path, contender: str, *, warmed_up: bool
) -> FirstSaves:
    command = [sys.executable, "-m", "nostall._bench.first_save", contender, shape, str(nbytes)]
    command += [str(directory), str(_SAVES_IN_EACH), "warm" if warmed_up else "cold"]
    done = subprocess.run(
        command,
        env=lone_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_TIMEOUT_S,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return FirstSaves(
        contender=contender,
        warmed_up=warmed_up,
        fresh_memory_found_s=found["fresh_memory_found_s"],
        fresh_memory_s=found["fresh_memory_s"],
        blocked_s=tuple(found["blocked_s"]),
        durable_s=tuple(found["durable_s"]),
    )
