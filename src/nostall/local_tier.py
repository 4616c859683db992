"""A local tier: what is in it, and the promotion of what an earlier job has left.

>>> writer = nostall.FileSystemWriterAsync("/lustre/step-100", local_staging_dir="/nvme/tier")
>>> dcp.save(state_dict, storage_writer=writer)  # committed on the local disk
>>> writer.promotion.result(timeout=600)  # committed in /lustre/step-100
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import nostall._queue.promotions_at_exit  # noqa: F401  # waits for them when the interpreter ends
from nostall._engine import default_engine
from nostall._storage.destination import local_tier_of
from nostall._tier.local import LocalCheckpoint, committed_in
from nostall._tier.promotion import Promotion, PromotionStatus
from nostall.errors import ReadError
from nostall.integrity import why_incomplete

__all__ = ["LocalCheckpoint", "Promotion", "PromotionStatus", "local_checkpoints", "promote"]


def local_checkpoints(
    local_staging_dir: str | os.PathLike[str],
) -> tuple[LocalCheckpoint, ...]:
    """The complete checkpoints in a local tier, the newest first; all ranks share them.

    Loading one is faster than loading it from its destination, and it may be newer than all that
    are there. Nothing reads a local tier unless told to.

    Raises:
        OptionError: The path cannot name a directory.
        ReadError: The local disk refuses.
    """
    return tuple(each for each in reversed(_committed(local_staging_dir)) if _is_whole(each))


def promote(local_staging_dir: str | os.PathLike[str]) -> tuple[Promotion, ...]:
    """Begin to promote what an earlier job has left in a local tier; on one rank.

    The first save with the same ``local_staging_dir`` does that, too.

    Returns:
        The promotions that are under way, oldest first; the process waits for them when it ends.

    Raises:
        OptionError: The path cannot name a directory.
        ReadError: The local disk refuses.
    """
    tier = local_tier_of(local_staging_dir)
    with _readable(tier):
        return tuple(default_engine().promotions.resume(tier))


def _committed(path: str | os.PathLike[str]) -> list[LocalCheckpoint]:
    tier = local_tier_of(path)
    with _readable(tier):
        return committed_in(tier)


@contextmanager
def _readable(tier: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReadError(
            f"the local tier cannot be read: {error.strerror or error}",
            errno=error.errno,
            phase="read",
            path=tier,
            hint="local_staging_dir must be a directory that this user can read",
        ) from error


def _is_whole(checkpoint: LocalCheckpoint) -> bool:
    return why_incomplete(checkpoint.path) is None
