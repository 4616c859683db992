"""Overlapped staging on ranks of a gloo group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nostall
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from programs.entry_points import loaded_wrong
from programs.planning import failure, make_state
from support.faults import Hold
from support.states import begin_async, schedule


def one_rank_that_forgets_to_wait_fails_the_save_on_all(out: Path) -> dict[str, Any]:
    """The second rank changes a tensor while its snapshot waits for memory, or is being taken."""
    nostall.configure(EngineOptions(max_in_flight=1))
    queue = AsyncCallsQueue()
    state = {**make_state(2), f"large {dist.get_rank()}": torch.zeros(5 << 20, dtype=torch.uint8)}
    facts: dict[str, Any] = {}
    with Hold() as hold:
        hold.stop(schedule, queue, out / "before", make_state(1))
        schedule(queue, out / "forgotten", state, staging="overlapped")
        if dist.get_rank() == 1:
            state["large 1"].add_(1)
        hold.release()
        facts["split"] = failure(queue.wait)["ranks"]
    schedule(queue, out / "next", make_state(3), staging="overlapped")
    nostall.wait_staged(60)
    queue.close()
    writer = FileSystemWriterAsync(out / "async", staging="overlapped")
    with Hold("stage") as hold:
        saving = hold.stop(begin_async, writer, state)
        if dist.get_rank() == 1:
            state["large 1"].add_(1)
        hold.release()
    facts["async"] = failure(lambda: saving.result(100))["ranks"]
    failed: Any = saving.exception()
    said = str(failed.failures[1][0])
    facts["said"] = [said.count(part) for part in ("phase=", "call wait_staged()")]
    facts["committed"] = sorted(path.parent.name for path in out.glob("*/.metadata"))
    facts["wrong"] = [
        *loaded_wrong(out / "before", make_state(1), make_state(0)),
        *loaded_wrong(out / "next", make_state(3), make_state(0)),
    ]
    return facts
