"""The process that copies: a thread for each local root. It imports no torch.

Whatever the destination refuses is tried again after a pause, without end. The process ends with
the trainer; the next one finds out what is there, and does the rest.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, NamedTuple, TypeAlias

from nostall._model.checksum import use_fastest_from
from nostall._model.jobs import Failure
from nostall._storage.places import take_storage_options
from nostall._writer.messages import Answer, Message, send
from nostall._writer.parent import ignore_signals, make_importable, messages_from_parent, say_ready
from nostall.errors import NostallError
from nostall.tier._copying import DRAFT, OLD_S, Copier, Hopeless, Waiting, files_of, promote
from nostall.tier._local import Directory, Record, committed_at, is_locked, names_in, unlock

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 20.0
_PROGRESS_EVERY_S = 0.25

Job: TypeAlias = dict[str, Any]
"""What to promote, and how."""


class Ask(NamedTuple):
    """A promotion; the lock's descriptor is sent with it."""

    job: Job


class News(NamedTuple):
    """Progress of a promotion, or why it does not go on."""

    job: str
    news: Job


def main(socket_fd: int, parent_pid: int, checksums_from: str) -> None:
    """Serve one trainer until it closes the socket or ends; arguments as of the writer process."""
    ignore_signals(signal.SIGTERM)
    sock = socket.socket(fileno=socket_fd)
    say_ready(sock, parent_pid, "nostall-tier")
    if checksums_from:
        use_fastest_from(checksums_from)
    sending, roots = threading.Lock(), dict[str, _Root]()

    def tell(message: Message) -> None:
        try:
            with sending:
                send(sock, message)
        except OSError:  # the trainer is gone
            os._exit(0)

    for message, descriptors in messages_from_parent(sock, parent_pid):
        assert isinstance(message, Ask)
        path = message.job["root"]
        if path not in roots:
            make_importable(message.job["sys_path"])
            take_storage_options(message.job["destination"], message.job["storage_options"])
            roots[path] = _Root(descriptors.pop(), tell)
            threading.Thread(target=roots[path].serve, name="nostall-tier", daemon=True).start()
        for fd in descriptors:
            os.close(fd)
        roots[path].asked.put(message.job)
    os._exit(0)  # whatever the other threads are doing


class _Root:
    def __init__(self, lock_fd: int, tell: Callable[[Message], None]) -> None:
        self.asked: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock_fd = lock_fd
        self._tell = tell
        self._jobs: list[Job] = []
        self._verified: dict[str, set[str]] = {}
        self._has_saved = False
        """Whether a checkpoint that this trainer has saved was promoted."""

    def serve(self) -> None:
        """Promote forever, in the order of the commits."""
        pause_s = _FIRST_PAUSE_S
        while True:
            with suppress(queue.Empty):
                self._jobs.append(self.asked.get(timeout=pause_s if self._jobs else None))
                pause_s = _FIRST_PAUSE_S
                while True:
                    self._jobs.append(self.asked.get_nowait())
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for job in list(self._jobs):
                try:
                    if job in self._jobs:
                        self._try(job)
                except Exception as error:  # whatever the client of a store raises; it may pass
                    is_text = isinstance(error, NostallError | OSError)
                    self._say(job, trouble=str(error) if is_text else repr(error))
                    break  # the next ones wait
                if job not in self._jobs:
                    pause_s = _FIRST_PAUSE_S

    def _try(self, job: Job) -> None:
        try:
            if not is_locked(self._lock_fd):
                raise Waiting("another process promotes from this directory")
            (self._bring if job["is_part"] else self._promote)(job)
        except Waiting as error:
            self._say(job, trouble=str(error), is_expected=True)
            if job["is_left"] and self._has_saved:  # the hosts of an earlier job may be gone
                self._end(job, Hopeless(str(error), job["root"]).failure)
        except Hopeless as error:
            self._end(job, error.failure)
        else:
            self._has_saved |= not job["is_left"]
            self._end(job, None)

    def _end(self, job: Job, failure: Failure | None) -> None:
        """Answer a job, and earlier ones of the same name: it is in their place."""
        for each in self._jobs[: self._jobs.index(job) + 1]:
            if each["name"] == job["name"]:
                self._jobs.remove(each)
                self._tell(Answer(each["job"], failure))
        self._verified.pop(job["name"], None)
        if job["shared"] and not self._jobs:  # another rank may promote, too
            unlock(self._lock_fd)

    def _promote(self, job: Job) -> None:
        root, name = job["root"], job["name"]
        record, checkpoint = Record(root, job["destination"]), committed_at(root, name)
        if checkpoint is None:
            raise Hopeless("the local checkpoint is gone", os.path.join(root, name))
        if not record.has(checkpoint):
            options = {option: job[option] for option in ("shared", "overwrite")}
            with closing(Directory(root, name)) as source:
                promote(source, self._copier(job), record, checkpoint, **options)

    def _bring(self, job: Job) -> None:
        """Bring files of a checkpoint whose metadata another host has; returns when it is there.

        What the checkpoint at the destination has is removed here. So is what is too old for a save
        under way, and was not drafted although a later save was promoted: it was not committed.
        """
        if job["name"] not in names_in(job["root"]):
            return
        with closing(Directory(job["root"], job["name"])) as source:
            copier, here, old_s = self._copier(job), source.shards(), time.time() - OLD_S
            drafted = files_of(copier.content(DRAFT))
            for file in drafted:
                if file.name in here:
                    try:
                        copier.bring(source, [file])
                    except Hopeless:  # the coordinator's host sees that it will not come
                        copier.storage.publish(file.name, [b""])
                        raise
            there = [file for file in files_of(copier.content()) if copier.has([file])]
            published = {file.name for file in there}
            old = {name for name, at_s in here.items() if self._has_saved and at_s < old_s}
            source.remove((published | old - {file.name for file in drafted}) & here.keys())
            if not published.issuperset(job["files"] or here):
                raise Waiting("the coordinator's host has not published it")
        for name in names_in(job["root"]):
            with suppress(OSError):  # not empty
                path = os.path.join(job["root"], name)
                if os.lstat(path).st_mtime < old_s:
                    os.rmdir(path)

    def _copier(self, job: Job) -> Copier:
        total_nbytes, next_s = 0, 0.0

        def on_progress(nbytes: int, of_nbytes: int) -> None:
            nonlocal total_nbytes, next_s
            total_nbytes += nbytes
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + _PROGRESS_EVERY_S
                self._say(job, nbytes=total_nbytes, of=of_nbytes)

        verified = self._verified.setdefault(job["name"], set())
        return Copier(f"{job['destination']}/{job['name']}", verified, on_progress)

    def _say(self, job: Job, **news: Any) -> None:
        self._tell(News(job["job"], news))
