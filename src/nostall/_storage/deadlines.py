"""Storage calls of the trainer, which end in time: each runs on a daemon thread, and is left behind if storage hangs.

A thread that stands in a system call cannot be ended. What it holds is its own until storage answers, and an interpreter that
ends does not wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from nostall._storage.posix import remove_files
from nostall.errors import SaveTimeoutError

_log = logging.getLogger("nostall")

REMOVAL_TIMEOUT_S = 2.0
"""For what a failed save left. It goes on behind the caller's back, who has waited for storage already."""
_INTERRUPTED_TIMEOUT_S = 2.0
_NAMED = 8

T = TypeVar("T")


def start_apart(name: str, work: Callable[[], object]) -> threading.Thread | None:
    """Do something on a daemon thread of its own.

    Returns:
        The thread; ``None`` if there is none, as the interpreter is ending or the system has no thread to give: it is done then.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        work()
        return None
    return thread


def in_time(
    call: Callable[[], T],
    *,
    timeout_s: float,
    doing: str,
    phase: str,
    path: str,
    rank: int | None = None,
    give_up: Callable[[], object] = lambda: None,
) -> T:
    """What a storage call returns, or raises, if it does so within ``timeout_s`` seconds.

    Args:
        call: Several system calls that belong together, as a thread costs about 60 µs.
        timeout_s: How long to wait.
        doing: What it does, for the error.
        phase: Stage of the save.
        path: What it is about.
        rank: Whose save it is.
        give_up: Tells the call that nobody waits for it any more.

    Raises:
        SaveTimeoutError: It is still running.
    """
    done: Future[T] = Future()
    try:
        start_apart("nostall-storage", partial(_settle, done, call))
        late = wait([done], timeout_s).not_done
    except BaseException:  # from outside, such as Ctrl-C
        give_up()
        wait([done], _INTERRUPTED_TIMEOUT_S)
        raise
    try:
        if late:
            give_up()
            raise SaveTimeoutError(
                f"storage did not answer within {timeout_s:g} s: {doing}",
                rank=rank,
                phase=phase,
                path=path,
                hint="storage hangs, or EngineOptions.save_timeout_s is too short",
            )
        return done.result()
    finally:
        del done  # an error holds this frame


def _settle(done: Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except BaseException as error:  # raised where somebody waits
        done.set_exception(error)
    else:
        done.set_result(result)


def remove_in_time(
    paths: Sequence[str],
    *,
    remove: Callable[[Sequence[str]], object] = remove_files,
    timeout_s: float = REMOVAL_TIMEOUT_S,
) -> None:
    """Remove files that nothing refers to, and wait ``timeout_s`` seconds for that at most.

    What takes longer is removed when storage answers, if this process lives that long; the log names it.
    """
    if not paths:
        return
    try:
        in_time(
            lambda: remove(paths),
            timeout_s=timeout_s,
            doing="removing files",
            phase="remove",
            path=paths[0],
        )
    except SaveTimeoutError:
        named = ", ".join(paths[:_NAMED]) + (", ..." if len(paths) > _NAMED else "")
        _log.warning(
            "storage has not removed %d files within %g s; nothing refers to them, and they may stay: %s",
            len(paths),
            timeout_s,
            named,
        )
