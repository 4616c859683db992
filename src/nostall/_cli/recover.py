"""``nostall recover PATH``: commit what its trainer could not commit."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from nostall._cli.arguments import NotThere, Status, add_json, at_least, place
from nostall._cli.checkpoints.listing import require_no_file, why_not_there
from nostall._cli.output import describe, print_error, print_json
from nostall._storage.places import storage_at
from nostall.errors import NostallError

if TYPE_CHECKING:
    from nostall.recovery import Recovery

HELP = "commit a save that its writer processes have finished after the trainer's death"
_LOOK_AGAIN_S = 0.5
DESCRIPTION = (
    "Commit the last save to a checkpoint directory, and to each one directly in PATH, that the"
    " writer processes of all ranks have finished after the death of their trainer: one with"
    " linger_s. Not while a job saves there. Exit status: 0 if all that was found is committed, 1"
    " if files of a rank are missing, 3 if nothing was found."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "path", type=place, metavar="PATH", help="checkpoint directory, or a directory of these"
    )
    parser.add_argument(
        "--wait",
        type=at_least(0),
        default=0,
        metavar="SECONDS",
        help="how long to wait for the files of all ranks, where some are (default: %(default)s)",
    )
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Print what was found, a line each."""
    from nostall.recovery import RecoveryState

    require_no_file(parsed.path)
    found, failures = _recover_all(parsed.path, parsed.wait)
    if parsed.json:
        print_json(
            [
                {"path": each.path, "state": each.state.value, "missing_ranks": each.missing_ranks}
                for each in found
            ]
        )
    else:
        for each in found:
            print(_described(each))
    for error in failures:
        print_error(describe(error))
    if failures or any(each.state is not RecoveryState.COMMITTED for each in found):
        return Status.FAILED
    if not found:
        if parsed.json:
            return Status.NOT_THERE
        raise NotThere(f"{parsed.path}: {_why_nothing(parsed.path)}")
    return Status.FINE


def _recover_all(path: str, wait_s: float) -> tuple[list[Recovery], list[NostallError]]:
    """What is found at a path and directly in it, and the errors of what cannot be recovered."""
    from nostall.recovery import RecoveryState, recover

    deadline_s = time.monotonic() + wait_s
    committed: dict[str, Recovery] = {}
    while True:
        incomplete: list[Recovery] = []
        failures: list[NostallError] = []
        for each in [path, *_inside(path)]:
            try:
                now = recover(each)
            except NostallError as error:
                failures.append(error)
                continue
            if now.state is RecoveryState.COMMITTED:
                committed[each] = now
            elif now.state is RecoveryState.INCOMPLETE:
                incomplete.append(now)
        if not incomplete or time.monotonic() >= deadline_s:
            return [*committed.values(), *incomplete], failures
        time.sleep(_LOOK_AGAIN_S)


def _inside(path: str) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return [f"{path}/{name}" for name in sorted(storage_at(path).list())]
    return []


def _why_nothing(path: str) -> str:
    try:
        storage_at(path).list()
    except (FileNotFoundError, NotADirectoryError):
        return why_not_there(path)
    return "nothing to recover"


def _described(found: Recovery) -> str:
    ranks = ", ".join(f"rank {rank}" for rank in found.missing_ranks[:8])
    more = ", ..." if len(found.missing_ranks) > 8 else ""
    missing = f": not finished by {ranks}{more}" if ranks else ""
    return f"{found.path}: {found.state.value}{missing}"
