"""``nostall verify PATH``: whether a checkpoint is what was written."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from nostall._cli.arguments import NotThere, Status, add_json, at_least, place
from nostall._cli.checkpoints.listing import elsewhere, require_no_file, why_not_there
from nostall._cli.output import print_json, printable, progress
from nostall._model.wording import counted

if TYPE_CHECKING:
    from nostall.integrity import Verification

HELP = "read every byte of a checkpoint and report any damage"
DESCRIPTION = (
    "Read every byte of a checkpoint and compare it with its checksums. Exit status: 0 if"
    " it is as it was written, 1 if it is damaged, not complete or cannot be read, 2 for wrong"
    " arguments, 3 if there is no checkpoint, 4 if it has no manifest and its metadata is not"
    " understood."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", type=place, metavar="PATH", help="checkpoint directory")
    add_json(parser)
    parser.add_argument(
        "--threads",
        type=at_least(1),
        default=8,
        help="number of files to read at a time (default: %(default)s)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Print the findings."""
    from nostall.integrity import State, verify

    require_no_file(parsed.path)
    with progress("verifying") as report:
        found = verify(parsed.path, threads=parsed.threads, progress=report)
    if found.state is State.NOT_THERE:
        found = replace(found, note=why_not_there(parsed.path) + elsewhere(parsed.path))
        if not parsed.json:
            raise NotThere(f"{parsed.path}: {found.note}")
    if parsed.json:
        print_json({"ok": found.ok, **asdict(found)})
    else:
        _print(found)
    return {
        State.WHOLE: Status.FINE,
        State.DAMAGED: Status.FAILED,
        State.UNREADABLE: Status.FAILED,
        State.NOT_THERE: Status.NOT_THERE,
        State.NOT_UNDERSTOOD: Status.NOT_UNDERSTOOD,
    }[found.state]


def _print(found: Verification) -> None:
    if found.note is not None:
        print(f"note: {printable(found.note)}")
    for damage in found.damages:
        what = "damaged" if damage.is_certain else "unreadable"
        print(f"{what}: {printable(str(damage))}")
    if found.unchecked:
        example = printable(found.unchecked[0])
        print(f"no checksum: {counted(len(found.unchecked), 'item')}, for example {example}")
    if not found.ok:
        verdict = found.state.value.upper()
    elif found.has_manifest:
        verdict = "whole, as it was written"
    else:
        verdict = (
            "no damage found; without a manifest, only the checksums of its records were compared"
        )
    size = f"{counted(found.items, 'item')}, {counted(found.files, 'file')}, {found.nbytes} bytes"
    print(f"{found.path}: {verdict}" + (f" ({size})" if found.files else ""))
