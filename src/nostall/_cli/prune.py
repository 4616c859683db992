"""``nostall prune ROOT --keep POLICIES``: remove checkpoints that no policy keeps."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from nostall._bench.quantities import format_nbytes
from nostall._cli.arguments import Commands, Status, add_json, checked
from nostall._cli.listing import (
    Listed,
    State,
    linked_from,
    list_checkpoints,
    look_at,
    newest_complete,
)
from nostall._cli.output import counted, print_error, print_json, print_table
from nostall._cli.retention import Rule, parse_rules, reasons
from nostall.errors import NostallError


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "prune",
        help="remove checkpoints that no policy keeps; a dry run by default",
        description="Remove the complete checkpoints that no policy keeps. Always kept: the last"
        " committed complete checkpoint, whatever a symbolic link in ROOT leads to, names that do"
        " not end with a step, everything that is not complete, and everything that is not directly"
        " in ROOT.",
    )
    parser.add_argument("root", metavar="ROOT", help="directory of checkpoint directories")
    parser.add_argument(
        *("--keep",),
        type=checked(parse_rules),
        action="append",
        required=True,
        metavar="POLICIES",
        help="latest=N: the N highest steps; every=N: steps that are multiples of N; every=6h: one"
        " in 6 hours (s, m, h, d); separated by commas, any of them keeps a checkpoint",
    )
    parser.add_argument("--delete", action="store_true", help="remove, instead of a dry run")
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print what is kept and why; remove the rest with ``--delete``."""
    checkpoints = list_checkpoints(parsed.root)
    rules = [rule for given in parsed.keep for rule in given]
    kept = why_kept(checkpoints, rules, linked_from(parsed.root))
    removable = [each for each in checkpoints if each.path not in kept]
    failed = _remove(removable, newest_complete(checkpoints)) if parsed.delete else []
    if parsed.json:
        _print_json(checkpoints, kept, failed, deleted=parsed.delete)
    else:
        _print(checkpoints, kept, removable, failed, deleted=parsed.delete)
    return Status.FAILED if failed else Status.FINE


def why_kept(
    checkpoints: Sequence[Listed], rules: Sequence[Rule], linked: set[str]
) -> dict[str, str]:
    """The checkpoints that stay, by path, with the reason.

    Args:
        checkpoints: Oldest first.
        rules: Any of them keeps a checkpoint.
        linked: Real paths that are in use under another name.
    """
    newest = newest_complete(checkpoints)
    candidates = [
        each
        for each in checkpoints
        if each.state is State.COMPLETE and each.step is not None and not _is_inside(each)
    ]
    kept = {path: ", ".join(why) for path, why in reasons(candidates, rules).items()}
    for each in checkpoints:
        if each.state is not State.COMPLETE:
            kept[each.path] = each.state.value
        elif _is_inside(each):
            kept[each.path] = "inside of another directory"
        elif each.step is None:
            kept[each.path] = "no step in its name"
        elif os.path.realpath(each.path) in linked:
            kept.setdefault(each.path, "a link leads to it")
    if newest is not None:
        kept.setdefault(newest.path, "the last complete one")
    return kept


def _is_inside(each: Listed) -> bool:
    """Whether it is a part of a step, or one of another root: the number ends no step of ROOT."""
    return os.sep in each.name


def _unchanged(each: Listed) -> bool:
    """Whether it is still the checkpoint that was listed, and no save has replaced it."""
    now = look_at(each.path)
    return now is not None and (now.state, now.at_s) == (each.state, each.at_s)


def _remove(removable: Sequence[Listed], newest: Listed | None) -> list[str]:
    """Remove checkpoints; returns the paths of those that are still there."""
    from nostall.removal import remove_checkpoint

    for position, each in enumerate(removable):
        # Another process may have removed or replaced it meanwhile.
        now = look_at(newest.path) if newest is not None else None
        if now is None or now.state is not State.COMPLETE:
            print_error("stopped: the last complete checkpoint is not complete any more")
            return [left.path for left in removable[position:]]
        try:
            if _unchanged(each):
                remove_checkpoint(each.path)
        except NostallError as error:
            print_error(str(error))
    return [each.path for each in removable if look_at(each.path) is not None]


def _print(
    checkpoints: Sequence[Listed],
    kept: dict[str, str],
    removable: Sequence[Listed],
    failed: Sequence[str],
    *,
    deleted: bool,
) -> None:
    action = "removed" if deleted else "remove"
    rows = []
    for each in checkpoints:
        what = "keep" if each.path in kept else "failed" if each.path in failed else action
        size = format_nbytes(each.nbytes)
        step = "" if each.step is None else str(each.step)
        rows.append((step, size, what, kept.get(each.path, ""), each.name))
    if rows:
        print_table(("step", "size", "action", "why", "name"), rows, right="step size")
    gone = [each for each in removable if each.path not in failed]
    total = f"{counted(len(gone), 'checkpoint')}, {format_nbytes(sum(e.nbytes for e in gone))}"
    if deleted:
        print(f"removed {total}")
    else:
        print(f"would remove {total}" + ("; nothing is removed without --delete" if gone else ""))


def _print_json(
    checkpoints: Sequence[Listed], kept: dict[str, str], failed: Sequence[str], *, deleted: bool
) -> None:
    print_json(
        {
            "deleted": deleted,
            "kept": kept,
            "removed": [
                each.path
                for each in checkpoints
                if each.path not in kept and each.path not in failed
            ],
            "failed": list(failed),
        }
    )
