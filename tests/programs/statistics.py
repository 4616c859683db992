"""Statistics on ranks of a gloo group."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
from programs.planning import make_state
from support.faults import Fault, inject


def the_slowest_rank_is_named_on_all_ranks(out: Path) -> dict[str, Any]:
    """The second rank's device takes half a second more."""
    logger, lines = logging.getLogger("nostall"), io.StringIO()
    logger.addHandler(logging.StreamHandler(lines))
    logger.setLevel(logging.INFO)
    writer = FileSystemWriterAsync(out / "save")
    faults = [Fault.delay("fsync", 0.5)] if dist.get_rank() == 1 else []
    with inject(*faults), AsyncCallsQueue() as queue:
        planned = save_state_dict_async_plan(make_state(1), writer)
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        finalize = [lambda: save_state_dict_async_finalize(*planned)]
        queue.schedule_async_request(AsyncRequest(save_fn, args, finalize, preload_fn=preload_fn))
    assert writer.stats is not None
    logged = lines.getvalue().count("\n")
    return {"rank": dist.get_rank(), "slowest": writer.stats.slowest_rank, "lines": logged}
