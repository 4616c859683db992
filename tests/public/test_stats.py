"""Where the time of a save went."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.stats import SaveStats
from support.faults import Fault, inject
from support.states import begin_async, planned, small_state


def saved(path: Path, **options: Any) -> tuple[SaveStats, float]:
    """The statistics of a split save, and how long it took by the clock."""
    began_s = time.monotonic()
    writer, request = planned(path, {**small_state(), "large": torch.ones(3 << 20)}, **options)
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(request)
    stats = writer.stats
    assert stats is not None
    return stats, time.monotonic() - began_s


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
def test_stages_that_follow_each_other_add_up_to_less_than_the_whole(
    tmp_path: Path, staging: str, caplog: pytest.LogCaptureFixture
) -> None:
    """None counts twice, and the writer's threads fit its wall-clock time; the log has the ends."""
    with caplog.at_level(logging.INFO, logger="nostall"):
        stats, took_s = saved(tmp_path / "save", thread_count=2, staging=staging)
    assert min(stats.plan_s, stats.stage_s, stats.written_s, stats.commit_s) > 0
    assert min(stats.layout_s, stats.queue_s) >= 0
    others_s = stats.plan_s + stats.layout_s + stats.stage_s + stats.queue_s + stats.commit_s
    assert others_s + stats.written_s <= took_s
    assert stats.files == 2
    assert stats.nbytes == sum(path.stat().st_size for path in tmp_path.glob("save/*.distcp"))
    assert stats.slowest_rank == stats.rank == 0
    assert stats.path == str(tmp_path / "save")
    first, second = (record.getMessage() for record in caplog.records if record.name == "nostall")
    assert first.startswith(f"saving: path={stats.path} ranks=1")
    assert second.startswith(f"committed: path={stats.path}")
    assert "slowest_rank=0" in second


def test_a_slow_device_shows_as_fsync_and_not_elsewhere(tmp_path: Path) -> None:
    """A stage that takes half a second more is the one that says so, and no other."""
    with inject(Fault.delay("fsync", 0.5)):
        stats, took_s = saved(tmp_path / "save", thread_count=1)
    assert stats.written_s >= stats.fsync_s >= 0.5
    others_s = stats.plan_s + stats.layout_s + stats.stage_s + stats.queue_s + stats.commit_s
    assert others_s + stats.written_s <= took_s


def test_the_trace_shows_trainer_and_writer_on_one_clock(tmp_path: Path) -> None:
    """A file that trace viewers read: complete events with times in order, on named tracks."""
    stats, _ = saved(tmp_path / "save", thread_count=1)
    stats.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    spans = {each["name"]: each for each in events if each["ph"] == "X"}
    assert tracks[spans["stage"]["tid"]] == "trainer"
    assert tracks[spans["fsync __0_0.distcp"]["tid"]].startswith("writer thread")
    order = ["plan", "stage", "write __0_0.distcp", "commit"]
    assert [spans[name]["ts"] for name in order] == sorted(spans[name]["ts"] for name in order)
    assert all(each["dur"] >= 0 for each in spans.values())


@pytest.mark.parametrize("staging", ["dcp.save", "blocking", "overlapped"])
def test_saves_of_stock_dcp_have_statistics_too(tmp_path: Path, staging: Any) -> None:
    """Staging, writing and commit are timed, also where DCP resets the writer in between."""
    state = {"t": torch.ones(1 << 20)}
    for path in (tmp_path / "0", tmp_path / "1"):
        if staging == "dcp.save":
            writer = FileSystemWriterAsync(path)
            dcp.save(state, storage_writer=writer, no_dist=True)
        else:
            writer = FileSystemWriterAsync(path, staging=staging)
            begin_async(writer, state, checkpoint_id=path, no_dist=True).result(60)
        stats = writer.stats
        assert stats is not None
        assert min(stats.stage_s, stats.written_s, stats.commit_s) > 0
        assert "stage" in {span.name for span in stats.spans}
