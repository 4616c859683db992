"""``nostall latest ROOT``: the checkpoint to resume from."""

from __future__ import annotations

import argparse
import os

from nostall._cli.arguments import NotThere, Status
from nostall._cli.checkpoints.listing import State, elsewhere, list_checkpoints
from nostall.errors import DamagedCheckpointError

HELP = "print the path of the last complete checkpoint"
DESCRIPTION = (
    "Print the path of the last committed checkpoint that is complete: its metadata is intact, and"
    " its files have their sizes; with --deep, every byte is as it was written. Exit status: 3 if"
    " no checkpoint was committed, 1 if all are damaged."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("root", metavar="ROOT", help="directory of checkpoint directories")
    parser.add_argument("--deep", action="store_true", help="compare every byte, as verify does")


def run(parsed: argparse.Namespace) -> int:
    """Print one path."""
    from nostall.integrity import latest_complete

    found = latest_complete(parsed.root, deep=parsed.deep)
    if found is None:
        _require_none(parsed.root)
        missing = "" if os.path.isdir(parsed.root) else "no such directory, so "
        raise NotThere(f"{parsed.root}: {missing}no complete checkpoint{elsewhere(parsed.root)}")
    print(found)
    return Status.FINE


def _require_none(root: str) -> None:
    """Require that there is no committed checkpoint where none is complete.

    Raises:
        DamagedCheckpointError: There is one: a job must not take this for a start from scratch.
    """
    listed = list_checkpoints(root) if os.path.isdir(root) else []
    committed = [each for each in listed if each.state in (State.COMPLETE, State.DAMAGED)]
    damaged = [each for each in committed if os.sep not in each.name]  # not below a directory
    if damaged:
        raise DamagedCheckpointError(
            f"all committed checkpoints are damaged ({len(damaged)})",
            path=root,
            hint=f"`nostall verify {damaged[-1].path}` lists the damage of the last one",
        )
