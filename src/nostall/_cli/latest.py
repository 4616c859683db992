"""``nostall latest ROOT``: the checkpoint to resume from."""

from __future__ import annotations

import argparse
import os

from nostall._cli.arguments import NotThere, Status
from nostall._cli.checkpoints.listing import elsewhere, why_not_there
from nostall._cli.output import counted
from nostall.errors import DamagedCheckpointError

HELP = "print the path of the last complete checkpoint"
DESCRIPTION = (
    "Print the path of the last committed checkpoint directly in ROOT, symbolic links included,"
    " that is complete: its"
    " metadata is intact, and its files have their sizes; with --deep, every byte is as it was"
    " written. Exit status: 3 if no checkpoint was committed there, 1 if all are damaged."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("root", metavar="ROOT", help="directory of checkpoint directories")
    parser.add_argument("--deep", action="store_true", help="compare every byte, as verify does")


def run(parsed: argparse.Namespace) -> int:
    """Print one path."""
    from nostall.integrity import latest_complete

    if os.path.lexists(parsed.root) and not os.path.isdir(parsed.root):
        raise NotThere(f"{parsed.root}: {why_not_there(parsed.root)}")
    found = latest_complete(parsed.root, deep=parsed.deep)
    if found is None:
        _require_nothing_committed(parsed.root)
        missing = "" if os.path.isdir(parsed.root) else "no such directory, so "
        raise NotThere(f"{parsed.root}: {missing}no complete checkpoint{elsewhere(parsed.root)}")
    print(found)
    return Status.FINE


def _require_nothing_committed(root: str) -> None:
    """Require that no checkpoint is committed in ``root``, where none is complete.

    Raises:
        DamagedCheckpointError: One is: a job must not take this for a start from scratch.
    """
    from nostall.integrity import committed_latest_first

    committed = committed_latest_first(root)
    if committed:
        raise DamagedCheckpointError(
            f"no complete checkpoint, but {counted(len(committed), 'damaged one')}",
            path=root,
            hint=f"`nostall verify {committed[0]}` lists the damage of the last one",
        )
