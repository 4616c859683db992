"""Storage calls of the trainer, with deadlines: each runs on a daemon thread.

:func:`call_with_deadline` runs any call; the others make a directory, look at it, or remove files.

A thread in a system call cannot be ended. If storage hangs, the thread is left behind with what it
holds until storage answers; an exiting interpreter does not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from nostall._model.names import counted, some
from nostall._model.threads import is_done, spawn_or_run
from nostall._storage.directories import remove_unnamed
from nostall._storage.locations import storage_at, why_no_directory
from nostall._storage.port import may_have
from nostall.errors import CheckpointExistsError, OptionError, SaveTimeoutError, WriteError

_log = logging.getLogger("nostall")

REMOVAL_TIMEOUT_S = 2.0
"""For files of a failed save; after that the removal goes on in the background."""
_NAMED = 8
_INTERRUPTED_TIMEOUT_S = 2.0

T = TypeVar("T")


def begin(name: str, call: Callable[[], T]) -> Future[T]:
    """Begin a call on a separate daemon thread; the future has its result, or its exception."""
    done: Future[T] = Future()
    spawn_or_run(name, partial(_settle, done, call))
    return done


def call_with_deadline(
    call: Callable[[], T],
    *,
    timeout_s: float,
    doing: str,
    phase: str,
    path: str,
    rank: int | None = None,
    give_up: Callable[[], object] = lambda: None,
) -> T:
    """The result of a storage call, or its exception, within ``timeout_s`` seconds.

    ``call`` makes all system calls that belong together, as another thread costs 50 to 100 µs.
    ``doing`` describes them for the ``SaveTimeoutError``. ``give_up`` is called when the caller no
    longer waits: before that error, or after Ctrl-C, which then waits for ``call`` for up to 2 s
    more.
    """
    done: Future[T] = Future()
    try:
        spawn_or_run("nostall-storage", partial(_settle, done, call))
        late = not is_done(done, timeout_s)
    except BaseException:  # an interrupt, such as Ctrl-C
        give_up()
        is_done(done, _INTERRUPTED_TIMEOUT_S)
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
        del done  # the frame stays alive with an error's traceback


def _settle(done: Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except OptionError as error:  # only the caller's lines help
        done.set_exception(error.with_traceback(None))
    except BaseException as error:  # raised in the waiting thread
        done.set_exception(error)
    else:
        done.set_result(result)


def make_ready(
    place: str,
    metadata_name: str,
    others: Sequence[str],
    *,
    overwrite: bool,
    rank: int | None,
    timeout_s: float,
) -> bool:
    """Make a checkpoint directory, and check that it holds no checkpoint that must not be replaced.

    Returns whether any of the metadata files may exist; the save will not replace ``others``.
    ``CheckpointExistsError`` if there may be a checkpoint, and ``overwrite`` is false;
    ``WriteError`` if the directory cannot be made; ``SaveTimeoutError`` if storage does not answer.
    """

    def make() -> bool:
        storage = storage_at(place)
        try:
            storage.make_place()
        except OSError as error:
            raise WriteError(
                f"cannot make the checkpoint directory: {error.strerror}",
                errno=error.errno,
                rank=rank,
                phase="plan",
                path=place,
                hint=why_no_directory(place, error.errno),
            ) from error
        is_taken = may_have(storage, metadata_name)
        if is_taken and not overwrite:
            raise must_stay(place, rank)
        return is_taken or any(may_have(storage, name) for name in others)

    return call_with_deadline(
        make,
        timeout_s=timeout_s,
        doing="making the checkpoint directory",
        phase="plan",
        path=place,
        rank=rank,
    )


def may_hold(
    place: str, metadata_names: Sequence[str], *, rank: int | None, timeout_s: float
) -> bool:
    """Whether a place may hold a checkpoint; true if storage refuses to tell.

    ``SaveTimeoutError`` if storage does not answer.
    """
    return call_with_deadline(
        lambda: any(map(partial(may_have, storage_at(place)), metadata_names)),
        timeout_s=timeout_s,
        doing="looking for an existing checkpoint",
        phase="plan",
        path=place,
        rank=rank,
    )


def must_stay(place: str, rank: int | None) -> CheckpointExistsError:
    """The error that a place holds a checkpoint that must not be replaced."""
    return CheckpointExistsError(
        # Stock's words, which programs look for.
        "Checkpoint already exists and self.overwrite=False (or storage gave no answer)",
        rank=rank,
        phase="plan",
        path=place,
        hint="choose another directory or pass overwrite=True",
    )


def remove_with_deadline(
    paths: Sequence[str],
    *,
    remove: Callable[[Sequence[str]], object] = remove_unnamed,
    timeout_s: float = REMOVAL_TIMEOUT_S,
) -> None:
    """Remove files, by default those that no metadata names, for up to ``timeout_s`` seconds.

    After that the files are logged; removal continues in the background while this process lives.
    """
    if not paths:
        return
    try:
        call_with_deadline(
            lambda: remove(paths),
            timeout_s=timeout_s,
            doing="removing files",
            phase="remove",
            path=paths[0],
        )
    except SaveTimeoutError:
        _log.warning(
            "storage has not removed %s within %g s, which may stay, unused: %s",
            counted(len(paths), "file"),
            timeout_s,
            some(paths, _NAMED),
        )
