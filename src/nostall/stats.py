"""Timing of a save: totals per stage, and a timeline for a trace viewer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nostall._model.jobs import FileReceipt

__all__ = ["LoadStats", "SaveStats", "Span"]

TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A timed section of a save; readings of ``time.monotonic`` in seconds."""

    name: str
    track: str
    """``trainer``, or a thread of the writer."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStats:
    """Bytes, files and seconds of one load, on one rank."""

    path: str
    items: int
    """Tensors and objects; a tensor counts once, whatever its chunks."""
    missing: tuple[str, ...]
    """Names of what the checkpoint does not have; empty unless ``strict=False``."""
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStats:
    """One rank's save in figures.

    Trainer stages are wall-clock seconds. Writer stages are summed over concurrent threads;
    ``written_s`` is their wall-clock time.
    """

    rank: int
    path: str
    nbytes: int
    """Bytes of this rank's files."""
    files: int
    plan_s: float
    """Planning and resolving by the split functions, without the layout; 0 where DCP plans."""
    layout_s: float
    stage_s: float
    """Taking the snapshot; concurrent with training under overlapped staging."""
    queue_s: float
    """From the snapshot to the opening of the first file."""
    checksum_s: float
    write_s: float
    fsync_s: float
    written_s: float
    """From the opening of the first file until the last file was durable."""
    commit_s: float
    """Collecting results and publishing the metadata. All ranks wait for it, except for saves that
    are committed before they finalise: of those it is 0 on ranks other than the coordinator."""
    retries: int
    """Attempts after the first, over all files."""
    slowest_rank: int | None
    """Rank with the longest time from the start of its planning until its files were durable.
    ``None`` before the save is finalised, and with ``dcp.save`` and ``dcp.async_save``, whose ranks
    do not exchange it."""
    spans: tuple[Span, ...] = field(repr=False)

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline in Trace Event Format, for Perfetto and ``chrome://tracing``.

        Times are in microseconds.
        """
        tracks = {TRAINER: 0}
        for span in self.spans:
            tracks.setdefault(span.track, len(tracks))

        def event(kind: str, name: str, tid: int, **more: Any) -> dict[str, Any]:
            return {"ph": kind, "name": name, "pid": self.rank, "tid": tid, **more}

        events = [event("M", "process_name", 0, args={"name": f"rank {self.rank}"})]
        for track, tid in tracks.items():
            events.append(event("M", "thread_name", tid, args={"name": track}))
        for span in self.spans:
            begin_us, duration_us = span.begin_s * 1e6, (span.end_s - span.begin_s) * 1e6
            tid = tracks[span.track]
            events.append(event("X", span.name, tid, ts=begin_us, dur=duration_us))
        return {"traceEvents": events}

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_chrome_trace` to a file."""
        with open(path, "w") as stream:
            json.dump(self.to_chrome_trace(), stream)


class Timeline:
    """Collects the spans of one save; thread-safe, as a list is appended to and copied at once."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the duration of the block, also if it raises."""
        begin_s = time.monotonic()
        try:
            yield
        finally:
            end_s = time.monotonic()
            self._spans.append(Span(name=name, track=TRAINER, begin_s=begin_s, end_s=end_s))

    def stats(
        self, *, rank: int, path: str, receipts: Sequence[FileReceipt], slowest_rank: int | None
    ) -> SaveStats:
        """The figures collected so far."""
        spans = list(self._spans)

        def total(name: str) -> float:
            return sum(span.end_s - span.begin_s for span in spans if span.name == name)

        staged_s = max((span.end_s for span in spans if span.name == "stage"), default=0.0)
        started_s = min((receipt.started_s for receipt in receipts), default=staged_s)
        finished_s = max((receipt.finished_s for receipt in receipts), default=started_s)
        written = [
            Span(
                name=f"{phase} {receipt.name}",
                track=f"writer thread {thread}",
                begin_s=begin_s,
                end_s=end_s,
            )
            for receipt in receipts
            for phase, thread, begin_s, end_s in receipt.work.spans
        ]
        return SaveStats(
            rank=rank,
            path=path,
            nbytes=sum(receipt.nbytes for receipt in receipts),
            files=len(receipts),
            plan_s=max(0.0, total("plan") - total("layout")),
            layout_s=total("layout"),
            stage_s=total("stage"),
            queue_s=max(0.0, started_s - staged_s) if staged_s else 0.0,
            checksum_s=sum(receipt.work.checksum_s for receipt in receipts),
            write_s=sum(receipt.work.write_s for receipt in receipts),
            fsync_s=sum(receipt.work.fsync_s for receipt in receipts),
            written_s=finished_s - started_s,
            commit_s=total("commit") or total("publish"),
            retries=sum(len(receipt.failed_attempts) for receipt in receipts),
            slowest_rank=slowest_rank,
            spans=(*spans, *written),
        )

    def duration_s(self, receipts: Sequence[FileReceipt]) -> float:
        """Seconds from the first span until the last file was durable."""
        begin_s = min((span.begin_s for span in list(self._spans)), default=0.0)
        return max((receipt.finished_s for receipt in receipts), default=begin_s) - begin_s
