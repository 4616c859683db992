"""``nostall latest ROOT``: the checkpoint to resume from."""

from __future__ import annotations

import argparse
import os

from nostall._cli.arguments import NotThere, Status
from nostall._cli.checkpoints.listing import elsewhere

HELP = "print the path of the last complete checkpoint"
DESCRIPTION = "Print the path of the last committed checkpoint that is complete."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("root", metavar="ROOT", help="directory of checkpoint directories")
    parser.add_argument("--deep", action="store_true", help="compare every byte, as verify does")


def run(parsed: argparse.Namespace) -> int:
    """Print one path."""
    from nostall.integrity import latest_complete

    found = latest_complete(parsed.root, deep=parsed.deep)
    if found is None:
        missing = "" if os.path.isdir(parsed.root) else "no such directory, so "
        raise NotThere(f"{parsed.root}: {missing}no complete checkpoint{elsewhere(parsed.root)}")
    print(found)
    return Status.FINE
