"""Saves through a local tier to a mounted file system that takes few bytes per second.

Beside them, in turns, saves to the local disk alone and saves to the slow file system alone. Prints
medians: how long training is blocked, until the checkpoint is committed where the save goes, and
until it is at its destination, where all of them are verified in the end.

    python tests/stress/slow_destination.py --mib 256 --rounds 5 --mb-per-s 50
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import nostall
from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from stress.mounted import Mount, why_not
from support.states import planned

TENSORS = 16
PATIENCE_S = 600.0


def save(
    queue: AsyncCallsQueue, cache: CheckpointMetadataCache, path: Path, tier: Path | None
) -> Any:
    """One split save, committed; the writer, and seconds until training goes on, and until then."""
    began_s = time.perf_counter()
    writer, request = planned(path, STATE, cache=cache, local_staging_dir=tier)
    queue.schedule_async_request(request)
    blocked_s = time.perf_counter() - began_s
    while queue.pending:  # as a training loop polls
        queue.maybe_finalize_async_calls(blocking=False)
        time.sleep(0.001)
    return writer, blocked_s, time.perf_counter() - began_s, began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb-per-s", type=float, default=50.0)
    options = parser.parse_args()
    if why_not():
        sys.exit(f"nothing can be mounted: {why_not()}")
    for number in range(TENSORS):
        STATE[f"w{number}"] = torch.randn((options.mib << 20) // 4 // TENSORS)
    nostall.warmup(STATE)
    figures: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=".", prefix="slow-") as directory:
        here, there = Path(directory).resolve() / "local", Path(directory).resolve() / "slow"
        there.mkdir()
        mount = Mount(there, write_nbytes_per_s=options.mb_per_s * 1e6)
        try:
            queues = {name: (AsyncCallsQueue(), CheckpointMetadataCache()) for name in KINDS}
            for turn in range(-2, options.rounds):  # two to learn the structure
                for name in KINDS:
                    place = here if name == "local disk" else mount.path
                    tier = here / "tier" if name == "local tier" else None
                    path = place / name.replace(" ", "-") / f"{turn % 2}"
                    writer, blocked_s, durable_s, began_s = save(*queues[name], path, tier)
                    if tier is not None:
                        writer.promotion.result(PATIENCE_S)
                    if turn >= 0:
                        there_s = time.perf_counter() - began_s
                        figures.setdefault(name, []).append((blocked_s, durable_s, there_s))
                    assert nostall.verify(path).ok, path
            for queue, _ in queues.values():
                queue.close()
        finally:
            mount.close()
    print(f"{options.mib} MiB, {options.mb_per_s:g} MB/s, medians of {options.rounds}")
    print("| saves to | blocked ms | committed s | at the destination s |")
    print("|---|---|---|---|")
    for name, found in figures.items():
        blocked_s, durable_s, there_s = map(statistics.median, zip(*found, strict=True))
        print(f"| {name} | {blocked_s * 1e3:.1f} | {durable_s:.3f} | {there_s:.2f} |")


STATE: dict[str, Any] = {}
KINDS = ("local disk", "local tier", "slow file system")

if __name__ == "__main__":
    main()
