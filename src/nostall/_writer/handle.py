"""The trainer's side of a writer process: submit jobs and the memory they are in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from nostall._memory.arena import Block, Lease
from nostall._model.jobs import Failure, RankFailed, RankReport, WriteJob
from nostall._storage.deadlines import remove_in_time
from nostall._storage.posix import remove_empty_files
from nostall._writer.child import Addressed, ChildProcess, bare_arguments
from nostall._writer.messages import Cancel, Created, MapBlock, Message, Progress, UnmapBlock


class WriterProcess(ChildProcess[RankReport]):
    """A process that writes file images to storage and never imports torch."""

    kind = "writer process"

    def __init__(
        self,
        *,
        cpu_priority: int | None,
        io_priority: int | None,
        send_timeout_s: float,
        on_progress: Callable[[str, int], None],
        on_created: Callable[[str, str], None],
    ) -> None:
        self._on_progress = on_progress
        self._on_created = on_created
        self._created: dict[str, Callable[[str], None]] = {}
        """Per job, the callback for each file that the process has made."""
        self._mapped: set[int] = set()
        super().__init__(
            bare_arguments("nostall._writer.main"),
            cpu_priority=cpu_priority,
            io_priority=io_priority,
            send_timeout_s=send_timeout_s,
        )

    def submit(self, job: WriteJob, lease: Lease) -> Future[RankReport]:
        """Submit a job.

        Args:
            job: The files to write; their images must not change before the future is done.
            lease: On the arena block with the images; kept until the process has answered.

        Returns:
            A future that always ends: with the writer's report, or with a failure if the process
            dies. The job's files are removed then.
        """
        created: list[str] = []

        def note(path: str) -> None:
            created.append(path)
            self._on_created(job.job, path)

        def on_death(failure: Failure) -> RankReport:
            remove_in_time(sorted(created))
            paths = [os.path.join(job.directory, image.name) for image in job.files]
            remove_empty_files(paths)  # made last, and not reported
            return RankFailed(
                rank=job.rank, failure=failure._replace(path=paths[0] if paths else job.directory)
            )

        self._created[job.job] = note
        report = self._ask(job.job, on_death, self._messages(job, lease.block), holds=lease)
        report.add_done_callback(lambda _: self._created.pop(job.job, None))
        return report

    def _messages(self, job: WriteJob, block: Block) -> Iterator[Addressed]:
        """A job, preceded by its block if the process has not received that yet."""
        if block.id not in self._mapped:
            self._mapped.add(block.id)
            yield MapBlock(block.id, block.nbytes), (block.fd,)
        yield job, ()

    def unanswered(self, save: str) -> dict[str, Future[RankReport]]:
        """The unanswered jobs of a save, and their futures."""
        with self._lock:
            return {
                job: waiting.future
                for job, waiting in self._waiting.items()
                if job.startswith(f"{save}/")
            }

    def cancel(self, save: str) -> None:
        """Ask the process to drop the jobs of a save; they are answered as aborted."""
        self._send((Cancel(job), ()) for job in self.unanswered(save))

    def forget(self, block_id: int) -> None:
        """Let the process unmap a block that the arena has freed."""
        if block_id in self._mapped and self.alive:
            self._mapped.discard(block_id)
            self._send_later(UnmapBlock(block_id))

    def _handle_event(self, message: Message) -> None:
        match message:
            case Progress():
                self._on_progress(message.job, message.nbytes)
            case Created():
                note = self._created.get(message.job)
                if note is not None:
                    note(message.path)
            case _:
                super()._handle_event(message)
