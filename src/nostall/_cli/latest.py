"""``nostall latest ROOT``: the checkpoint to resume from."""

from __future__ import annotations

import argparse
import os

from nostall._cli.arguments import NotThere, Status, place
from nostall._cli.checkpoints.listing import (
    elsewhere,
    is_complete_by_manifest,
    require_no_checkpoint,
    require_no_file,
    why_not_there,
)
from nostall._commit.committed import committed_latest_first
from nostall._model.wording import counted
from nostall.errors import DamagedCheckpointError

HELP = "print the path of the last complete checkpoint"
DESCRIPTION = (
    "Print the path of the last committed checkpoint directly in ROOT, symbolic links included,"
    " that is complete: its metadata is intact, and its files have their sizes; with --deep, every"
    " byte is as it was written. Exit status: 3 if no checkpoint was committed there, 1 if all are"
    " damaged or ROOT is a broken symbolic link, 2 if ROOT is a file or a checkpoint itself."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "root", type=place, metavar="ROOT", help="directory of checkpoint directories"
    )
    parser.add_argument("--deep", action="store_true", help="compare every byte, as verify does")


def run(parsed: argparse.Namespace) -> int:
    """Print one path."""
    require_no_file(parsed.root)
    found = _latest_complete(parsed.root, deep=parsed.deep)
    if found is None:
        _require_nothing_committed(parsed.root)
        require_no_checkpoint(parsed.root)
        there = os.path.isdir(parsed.root)
        why = "no complete checkpoint in it" if there else why_not_there(parsed.root)
        raise NotThere(f"{parsed.root}: {why}{elsewhere(parsed.root)}")
    print(found)
    return Status.FINE


def _latest_complete(root: str, *, deep: bool) -> str | None:
    """As :func:`nostall.latest_complete`, and without torch if it is the last one committed."""
    committed = committed_latest_first(root)
    if not committed:
        return None
    if not deep and is_complete_by_manifest(committed[0]):
        return committed[0]
    from nostall.integrity import latest_complete

    return latest_complete(root, deep=deep)


def _require_nothing_committed(root: str) -> None:
    """Require that no checkpoint is committed in ``root``, where none is complete.

    Raises:
        DamagedCheckpointError: One is: a job must not take this for a start from scratch.
    """
    committed = committed_latest_first(root)
    if committed:
        raise DamagedCheckpointError(
            f"no complete checkpoint, but {counted(len(committed), 'damaged one')}",
            path=root,
            hint=f"`nostall verify {committed[0]}` lists the damage of the last one",
        )
