"""The one process-wide object: memory for snapshots and the processes that write them.

An :class:`Engine` holds all that outlives a save, and nothing else. The first save that needs the
default engine makes it; :func:`configure` replaces it, :func:`reset` ends it. It is independent of
writers, queues and checkpoints.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nostall._memory.arena import Arena, Block, Lease
from nostall._memory.copying import CopyMethod
from nostall._memory.devices import Pinning
from nostall._memory.overlap import any_snapshot_in_progress, wait_staged
from nostall._memory.staged_state import Placement
from nostall._model.checksum import use_fastest
from nostall._model.jobs import RankReport, WriteJob
from nostall._model.progress import LoadStatus, Progress, SavesInProgress, SaveStatus, load_statuses
from nostall._model.threads import is_done, spawn_in_torch, uninterrupted
from nostall._model.values import ItemShape, Layout
from nostall._plan.layout import FileNaming, Packing, lay_out, with_naming
from nostall._ranks.failures import CANCEL_TIMEOUT_S, joined, when_done
from nostall._writer.trainer_side import WriterProcess
from nostall.errors import OptionError, SaveAbortedError
from nostall.options import EngineOptions

_log = logging.getLogger("nostall")

_LAYOUTS_KEPT = 8
_IO_THREADS = 12
_IO_THREADS_PER_HOST = 32


class Engine:
    """Memory, writer processes and cached layouts of one trainer process. Thread-safe."""

    def __init__(self, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        use_fastest()  # for saves that are written in this process
        self.arena = Arena(max_blocks=self.options.max_in_flight, on_drop=self._forget)
        self.placements: dict[Any, Placement] = {}
        """Places of staged payloads in their images, by structure and options."""
        self.faults = b""
        """Faults for saves that start now, see ``_model.jobs.Faults``; set by tests only."""
        self.in_progress = SavesInProgress()
        """Progress of the saves that use this engine."""
        self._cancellable: dict[threading.Event, str] = {}
        """Events that stop threads of this process which write or copy, and their jobs."""
        self._is_closed = False
        self._writers: list[WriterProcess] = []
        self._lay_out = lru_cache(_LAYOUTS_KEPT)(lay_out)
        self._reserving: Future[None] | None = None
        """Set by :meth:`reserve_on_thread` until a save has waited for it."""
        self._reserver: int | None = None
        """The thread that reserves."""
        self._pinning = Pinning()
        self._lock = threading.RLock()

    @property
    def copy_method(self) -> CopyMethod:
        """How large CPU tensors are copied."""
        return CopyMethod(
            threads=self.options.copy_threads or torch.get_num_threads(),
            past_caches=self.options.copy_past_caches,
        )

    @property
    def io_threads(self) -> int:
        """How many threads of a writer process checksum and write."""
        if self.options.io_threads is not None:
            return self.options.io_threads
        # Set by torchrun; a device gains nothing from more writers than it has queues.
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, min(_IO_THREADS, _IO_THREADS_PER_HOST // max(1, ranks_here)))

    def lay_out(self, shapes: Sequence[ItemShape], naming: FileNaming, packing: Packing) -> Layout:
        """The layout of these items, from the cache if they were laid out before."""
        # Without file names: a save that replaces a checkpoint uses its names once.
        unnamed = FileNaming(prefix="", separation_hint=naming.separation_hint)
        return with_naming(self._lay_out(tuple(shapes), unnamed, packing), naming)

    def lease(self, nbytes: int, *, beyond_limit: bool = False, as_buffer: bool = False) -> Lease:
        """Snapshot memory; see :meth:`nostall._memory.arena.Arena.lease`."""
        timeout_s = self.options.save_timeout_s
        self._await_reservation(self._reserving, timeout_s)
        lease = self.arena.lease(
            nbytes, timeout_s=timeout_s, beyond_limit=beyond_limit, as_buffer=as_buffer
        )
        # Not when the block is made: a warmed-up block may be older than the CUDA context.
        with self._lock:
            self._pinning.pin(lease.block)
        return lease

    def reserve_on_thread(self, reserve: Callable[[], None]) -> None:
        """Run ``reserve`` on a thread; a save that begins meanwhile waits, and reserves no more."""
        earlier = self._reserving

        def run() -> None:
            self._await_reservation(earlier, self.options.save_timeout_s)
            self._reserver = threading.get_ident()
            try:
                reserve()
            finally:
                if self._reserver == threading.get_ident():  # not a later one's
                    self._reserver = None

        self._reserving = spawn_in_torch("nostall-warmup", run)

    def _await_reservation(self, reserving: Future[None] | None, timeout_s: float) -> None:
        if reserving is None or self._reserver == threading.get_ident():
            return
        if not is_done(reserving, timeout_s):
            _log.warning(
                "the warm-up did not finish within %g s; the save reserves memory itself", timeout_s
            )
        if self._reserving is reserving:
            self._reserving = None

    def remember_placement(self, key: Any, placement: Placement) -> None:
        """Keep the places of a staged structure's payloads for its next staging."""
        with self._lock:
            self.placements.pop(key, None)
            self.placements[key] = placement
            if len(self.placements) > _LAYOUTS_KEPT:
                del self.placements[next(iter(self.placements))]

    def set_priority(self, cpu_priority: int | None, io_priority: int | None) -> None:
        """Set the priorities of all writer processes; ``None`` keeps the configured value."""
        with self._lock:
            cpu_priority = self.options.cpu_priority if cpu_priority is None else cpu_priority
            io_priority = self.options.io_priority if io_priority is None else io_priority
            if (cpu_priority, io_priority) == (self.options.cpu_priority, self.options.io_priority):
                return
            self.options = replace(self.options, cpu_priority=cpu_priority, io_priority=io_priority)
            for writer in self._writers:
                writer.set_priority(cpu_priority, io_priority)

    def submit(
        self,
        job: WriteJob,
        lease: Lease,
        progress: Progress,
        *,
        after: Sequence[Future[RankReport]] = (),
    ) -> Future[RankReport]:
        """Send a rank's job to the writer process. The lease is released when it is done.

        The reports of ``after``, earlier submissions of the same save, become part of the report.
        """
        writer = self.writer()
        # The job owns the lease now: on an exception from outside, such as Ctrl-C, the caller
        # releases its own while the writer process may still read the memory.
        leases = [self.arena.adopt(lease)]

        def finish(reports: list[RankReport]) -> RankReport:
            # Before the report: the memory is free when the caller has it. No reference stays, as
            # this function is part of a cycle, and the arena may drop the block.
            leases.pop().release()
            return joined(reports)

        here = when_done([writer.submit(job, leases[0], progress)], finish)
        return when_done([*after, here], joined) if after else here

    def writer(self) -> WriterProcess:
        """The running writer process; a dead one is replaced.

        ``SaveAbortedError`` if the engine was closed. A process of another user, from before
        ``setuid``, is closed here once it is idle.
        """
        with self._lock:
            if self._is_closed:
                raise SaveAbortedError(
                    "the engine that this save belongs to was closed",
                    phase="start",
                    hint="make a new writer; call configure() and reset() only while no save runs",
                )
            others = [writer for writer in self._writers if writer.user != os.geteuid()]
            for writer in others:
                if writer.idle:
                    writer.close()
            self._writers = [writer for writer in self._writers if writer.alive]
            usable = [writer for writer in self._writers if writer not in others]
            if not usable:
                usable.append(
                    WriterProcess(
                        cpu_priority=self.options.cpu_priority,
                        io_priority=self.options.io_priority,
                        send_timeout_s=self.options.save_timeout_s,
                    )
                )
                self._writers.append(usable[0])
            return usable[0]

    @property
    def is_writing(self) -> bool:
        """Whether a writer process has an unfinished job, or a snapshot for one is being taken."""
        with self._lock:
            writers = list(self._writers)
        return any_snapshot_in_progress() or any(not writer.idle for writer in writers)

    def cancel(self, job: str, done: Future[RankReport] | None = None) -> None:
        """Cancel one save: writer processes that do not answer in time are killed.

        ``done`` is the report to wait for, too, as threads of this process may write.
        """
        with self._lock:
            self.stop_threads(job)
            answers = {each: list(each.unanswered(job).values()) for each in self._writers}
        for writer, asked in answers.items():
            if asked:
                writer.cancel(job)
        ends_s = time.monotonic() + CANCEL_TIMEOUT_S
        for writer, asked in answers.items():
            if not all(is_done(each, ends_s - time.monotonic()) for each in asked):
                writer.kill("it did not stop when the save was aborted", kind="SaveAbortedError")
        if done is not None:
            is_done(done, ends_s - time.monotonic())

    def stop_threads(self, job: str) -> None:
        """Stop this process's threads that write or copy for a save; they remove what they have
        made. Returns at once.
        """
        with self._lock:
            for cancelled, of_job in self._cancellable.items():
                if of_job == job:
                    cancelled.set()

    @contextmanager
    def cancellable(self, job: str) -> Iterator[threading.Event]:
        """An event that :meth:`stop_threads` sets; for a thread that writes or copies."""
        cancelled = threading.Event()
        with self._lock:
            self._cancellable[cancelled] = job
        try:
            yield cancelled
        finally:
            with self._lock:
                del self._cancellable[cancelled]

    def abort(self, reason: str) -> None:
        """Kill the writer processes and stop the threads that write or copy; unfinished saves fail
        with ``reason``, and their files are removed.
        """
        with self._lock:
            writers, self._writers = self._writers, []
            for cancelled in self._cancellable:
                cancelled.set()
        for writer in writers:
            writer.kill(reason, kind="SaveAbortedError")

    def close(self) -> None:
        """End idle writer processes and return memory. Idempotent."""
        with self._lock:
            self._is_closed = True
            writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()
        self.arena.close()

    def _forget(self, block: Block) -> None:
        with self._lock:
            writers = list(self._writers)
            self._pinning.unpin(block)
        for writer in writers:
            writer.forget(block.id)


class _Process:
    """The engine of this process, which saves share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None


_process = _Process()


def default_engine() -> Engine:
    """The engine of this process, made on first use."""
    with _process.lock:
        if _process.engine is None:
            _process.engine = Engine()
        return _process.engine


def configure(options: EngineOptions) -> None:
    """Use these options for all saves from now on.

    Raises:
        OptionError: Saves are being written, or ``options`` is not an ``EngineOptions``.
    """
    if not isinstance(options, EngineOptions):
        raise OptionError(
            f"configure() got an object of type {type(options).__name__}",
            hint="use configure(EngineOptions(name=value))",
        )
    with uninterrupted():
        with _process.lock:
            if _process.engine is not None and _process.engine.is_writing:
                raise OptionError(
                    "the engine cannot be configured while saves are being written",
                    hint="configure it before the first save, or finish the saves in flight first",
                )
            old, _process.engine = _process.engine, Engine(options)
        if old is not None:
            old.close()


def status() -> tuple[SaveStatus | LoadStatus, ...]:
    """Progress of this process's saves, and of loads by nostall's readers, each oldest first.

    Callable from any thread, without waiting.
    """
    with _process.lock:
        engine = _process.engine
    saves = () if engine is None else engine.in_progress.statuses()
    return (*saves, *load_statuses())


def wait_staged_before_step(optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Run :func:`nostall.wait_staged` before every step of an optimizer.

    Subclasses of ``torch.optim.Optimizer`` need no hook: their steps wait, for
    ``EngineOptions.save_timeout_s`` at most. This is for other optimizers with a
    ``register_step_pre_hook``.

    Returns:
        A handle whose ``remove()`` removes the hook.
    """
    return optimizer.register_step_pre_hook(lambda *_: wait_staged())


def reset() -> None:
    """End the default engine: processes, memory and caches. The next save makes a new one."""
    with uninterrupted():
        with _process.lock:
            old, _process.engine = _process.engine, None
        if old is not None:
            old.abort("the engine was reset")
            old.close()


def _after_fork_in_child() -> None:
    _process.lock = threading.Lock()  # another thread may have held it at the fork
    old, _process.engine = _process.engine, None
    if old is not None:
        for writer in old._writers:  # processes and descriptors of the parent
            writer.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
