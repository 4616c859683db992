"""Promotions that are not over when the interpreter ends.

They are waited for within a time limit. If a checkpoint is not at its destination then, the exit
status says so: a local disk may not outlive the job.
"""

from __future__ import annotations

import atexit
import logging

from nostall._engine import default_engine, missing_promotions
from nostall._model.wording import counted
from nostall._queue.at_exit import end_with_a_loss
from nostall._queue.preemption import preemption
from nostall._tier.promotions import await_all

_log = logging.getLogger("nostall")


def finish_promotions_at_exit() -> None:
    """Wait for all promotions; end the process with a failure if one is not over in time.

    Ctrl-C ends the wait.
    """
    missing = missing_promotions()
    if not missing:
        return
    timeout_s = min(default_engine().options.exit_timeout_s, preemption.left_s)
    unfinished = sum(not promotion.done for promotion in missing)
    try:
        if unfinished:
            _log.warning(
                "the interpreter ends with %s on the way to the destination; waiting up to %g s",
                counted(unfinished, "checkpoint"),
                timeout_s,
            )
        left = await_all(missing, timeout_s)
    except BaseException:  # Ctrl-C
        left = missing_promotions()
    for promotion in left:
        _log.error("not at its destination: path=%s: %s", promotion.path, promotion.why_missing)
    if left:
        default_engine().promotions.close()
        end_with_a_loss()


# Before the hook of nostall._queue.live, which imports this: hooks run in reverse order.
atexit.register(finish_promotions_at_exit)
