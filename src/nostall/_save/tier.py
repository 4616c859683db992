"""How a save uses a local tier: the way around the destination, and its end.

Ranks that do not share the tier bring their own files; each leaves a record of them before the
coordinator can commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch.distributed.checkpoint import FileSystemWriter

from nostall._engine import Engine
from nostall._model.values import RankFiles
from nostall._storage.deadlines import in_time
from nostall._storage.places import may_have
from nostall._storage.posix_storage import PosixStorage
from nostall._tier.local import is_promoted, record_destination
from nostall._tier.promotion import Promotion
from nostall.errors import OptionError, SaveTimeoutError, WriteError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The local tier of one writer."""

    path: str
    destination: str
    directory: str
    """In the tier, for checkpoints that belong at the destination."""
    is_shared: bool
    """Whether all ranks see the same directory."""
    limit: int
    """How many checkpoints may wait for their destinations."""
    overwrite: bool
    """Whether a checkpoint at the destination may be replaced."""

    def make_room(self, engine: Engine, *, is_part: bool, rank: int) -> None:
        """Make the directory, once fewer checkpoints wait than allowed.

        Args:
            engine: The engine that promotes.
            is_part: Whether this rank's parts are counted, and not the checkpoints.
            rank: This rank.

        Raises:
            SaveTimeoutError: Too many wait, still, or the local disk does not answer.
            WriteError: The local disk refuses.
        """

        def make() -> str:
            record_destination(
                self.directory,
                self.destination,
                by_rank=not self.is_shared,
                only_new=not self.overwrite,
            )
            return self.directory

        with self._usable(phase="plan", rank=rank):
            engine.promotions.make_room(
                self.path,
                self.limit,
                make,
                is_part=is_part,
                timeout_s=engine.options.save_timeout_s,
                rank=rank,
            )

    def is_promoted(self, engine: Engine, rank: int) -> bool:
        """Whether the promotion of what is committed here is over; raises as :meth:`make_room`."""
        with self._usable(phase="plan", rank=rank):
            return self._in_time(partial(is_promoted, self.directory), engine, "plan", rank)

    def require_files(self, written: Sequence[RankFiles | None], engine: Engine, rank: int) -> None:
        """Refuse to commit if the files of a rank are in another tier of the same path.

        Raises:
            SaveTimeoutError: The local disk does not answer.
            WriteError: A file is not here.
        """
        if self.is_shared:
            self._in_time(partial(self._require_files, written, rank), engine, "commit", rank)

    def _require_files(self, written: Sequence[RankFiles | None], rank: int) -> None:
        here = PosixStorage(self.directory)
        for number, each in enumerate(written):
            for file in () if each is None or each.files is None else each.files:
                if not may_have(here, file.name):
                    raise WriteError(
                        f"a file of rank {number} is not in the local tier of the coordinator",
                        rank=rank,
                        phase="commit",
                        path=here.where(file.name),
                        hint="pass local_staging_shared=False if each host has its own",
                    )

    def begin(self, engine: Engine) -> Promotion:
        """Promote the checkpoint that was just committed."""
        return engine.promotions.begin(self.path, self.directory, self.destination)

    def begin_part(self, written: RankFiles, engine: Engine, rank: int) -> None:
        """Bring the files that this rank has written, if that is its task.

        Raises:
            SaveTimeoutError: The local disk does not answer.
            WriteError: It refuses.
        """
        if self.is_shared or not written.files:
            return
        with self._usable(phase="collect", rank=rank):
            engine.promotions.begin_part(
                self.path,
                self.directory,
                self.destination,
                written.files,
                timeout_s=engine.options.save_timeout_s,
                rank=rank,
            )

    def _in_time(self, call: Callable[[], T], engine: Engine, phase: str, rank: int) -> T:
        return in_time(
            call,
            timeout_s=engine.options.save_timeout_s,
            doing="looking at the local tier",
            phase=phase,
            path=self.directory,
            rank=rank,
        )

    @contextmanager
    def _usable(self, *, phase: str, rank: int) -> Iterator[None]:
        try:
            yield
        except SaveTimeoutError:
            raise
        except OSError as error:
            raise WriteError(
                f"the local tier cannot be used: {error.strerror or error}",
                errno=error.errno,
                rank=rank,
                phase=phase,
                path=self.path,
                hint="local_staging_dir must be a directory that this user can write to",
            ) from error


def require_possible(
    tier: str, destination: str, writer: FileSystemWriter, *, has_stream: bool
) -> None:
    """Refuse what a local tier cannot do.

    Raises:
        OptionError: The destination or another option of the writer excludes it.
    """
    if has_stream:
        raise OptionError(
            "open_file and stream extensions do not support local_staging_dir",
            path=tier,
            hint="leave one of them out",
        )
    if not writer.use_collectives:
        raise OptionError(
            "ranks that save alone (no_dist=True or use_collectives=False with several ranks) do"
            " not support local_staging_dir",
            path=tier,
            hint="save together, or leave local_staging_dir out",
        )
    if f"{destination}/".startswith(f"{tier}/"):
        raise OptionError(
            "the checkpoint path is in local_staging_dir",
            path=destination,
            hint="the path is the destination, on other storage",
        )
    if f"{tier}/".startswith(f"{destination}/"):
        raise OptionError(
            "local_staging_dir is in the checkpoint path",
            path=tier,
            hint="use a directory on a fast disk, for all checkpoints of the job",
        )
