"""``nostall ls ROOT``: the checkpoints in a directory."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from nostall._cli.arguments import NotThere, Status, add_json, place
from nostall._cli.checkpoints.listing import Listed, list_checkpoints, list_links, look_at
from nostall._cli.output import format_age, format_size, print_json, print_table
from nostall._storage.destination import place_of

HELP = "list the checkpoints in a directory: step, size, age, state"
DESCRIPTION = (
    "List the checkpoints in a directory, and in its subdirectories, oldest first; also those"
    " behind symbolic links in the directory. The state tells whether metadata and file sizes are"
    " as committed; verify reads the bytes, too."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "root", type=place, metavar="ROOT", help="directory of checkpoint directories"
    )
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Print a row per checkpoint."""
    found = list_checkpoints(parsed.root) + list_links(parsed.root)
    checkpoints = sorted(found, key=lambda each: each.order)
    if not checkpoints:
        itself = look_at(place_of(parsed.root))
        if itself is None:
            raise NotThere(f"{parsed.root}: no checkpoint directories in it")
        checkpoints = [itself]
    if parsed.json:
        print_json([_plain(each) for each in checkpoints])
        return Status.FINE
    now_s = time.time()
    print_table(
        ("step", "size", "files", "age", "state", "name"),
        [
            (
                "" if each.step is None else str(each.step),
                format_size(each.nbytes),
                str(each.files),
                format_age(now_s - each.at_s),
                each.state.value,
                _named(each),
            )
            for each in checkpoints
        ],
        right="step size files age",
    )
    return Status.FINE


def _named(each: Listed) -> str:
    return each.name if each.link is None else f"{each.name} -> {each.link}"


def _plain(listed: Listed) -> dict[str, object]:
    return {**asdict(listed), "step": listed.step}
