"""``nostall prune ROOT --keep POLICIES``: remove checkpoints that no policy keeps."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nostall._cli.arguments import NotThere, Status, add_json, checked, place
from nostall._cli.checkpoints.listing import (
    Listed,
    State,
    elsewhere,
    linked_from,
    list_checkpoints,
    look_at,
    newest_complete,
    require_no_checkpoint,
)
from nostall._cli.output import describe, format_size, print_error, print_json, print_table
from nostall._manager.policies import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    Policy,
    StepRecord,
    metrics_in,
    unseen_metrics,
)
from nostall._model.wording import counted
from nostall.errors import NostallError, OptionError
from nostall.tier._local import RECORD

HELP = "remove checkpoints that no policy keeps; a dry run by default"
DESCRIPTION = (
    "Remove the complete checkpoints that no policy keeps. Always kept: the last"
    " committed complete checkpoint, whatever a symbolic link in ROOT leads to, names that do"
    " not end with a step, and everything that is not complete, in a local_staging_dir, or not"
    " directly in ROOT."
)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_INTERVAL = re.compile(r"(\d+)([smhd])")
_BEST = re.compile(r"(\d+):(.+?)(?::(min|max))?")
_USAGE = (
    "write latest=3, best=2:loss, best=2:accuracy:max, every=1000 (steps) or every=6h (s, m, h or"
    " d), separated by commas"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "root", type=place, metavar="ROOT", help="directory of checkpoint directories"
    )
    parser.add_argument(
        "--keep",
        type=checked(parse_rules),
        action="append",
        required=True,
        metavar="POLICIES",
        help="latest=N: the N highest steps; best=N:METRIC, or best=N:METRIC:max: the N steps with"
        " the lowest or highest value of a metric saved by a CheckpointManager; every=N: steps"
        " that are multiples of N; every=6h: one in 6 hours (s, m, h, d); separated by commas, any"
        " of them keeps a checkpoint",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="verify every byte first: a damaged checkpoint is not complete, so it is not the last"
        " complete one",
    )
    parser.add_argument("--delete", action="store_true", help="remove, instead of a dry run")
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Print what is kept and why; remove the rest with ``--delete``."""
    checkpoints = list_checkpoints(parsed.root)
    if not checkpoints:
        require_no_checkpoint(parsed.root)
        raise NotThere(f"{parsed.root}: no checkpoint directories in it{elsewhere(parsed.root)}")
    if parsed.deep:
        checkpoints = [_verified(each) for each in checkpoints]
    rules = [rule for given in parsed.keep for rule in given]
    kept = why_kept(checkpoints, rules, linked_from(parsed.root))
    removable = [each for each in checkpoints if each.path not in kept]
    failed = _remove(removable, newest_complete(checkpoints)) if parsed.delete else []
    gone = [each for each in removable if each.path not in failed]
    if parsed.json:
        action = "removed" if parsed.delete else "would_remove"
        print_json({"kept": kept, action: [each.path for each in gone], "failed": failed})
    else:
        _print(checkpoints, kept, gone, failed, deleted=parsed.delete)
    return Status.FAILED if failed else Status.FINE


@dataclass(frozen=True, slots=True)
class Rule:
    """A policy, and the text that it was given by."""

    text: str
    policy: Policy


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Rules from ``latest=3,every=1000``.

    Raises:
        ValueError: The text has another form.
    """
    parts = [part.strip() for part in text.split(",")]
    return tuple(Rule(part, _policy(part)) for part in parts)


def _policy(text: str) -> Policy:
    kind, _, value = text.partition("=")
    interval = _INTERVAL.fullmatch(value)
    if kind == "every" and interval is not None and int(interval[1]):
        return KeepEvery(seconds=int(interval[1]) * _UNITS_S[interval[2]])
    best = _BEST.fullmatch(value)
    if kind == "best" and best is not None and int(best[1]):
        return KeepBest(int(best[1]), best[2], "max" if best[3] == "max" else "min")
    if kind in ("latest", "every") and value.isascii() and value.isdecimal() and int(value):
        return KeepLatest(int(value)) if kind == "latest" else KeepEvery(steps=int(value))
    raise ValueError(f"{text!r} is not a policy; {_USAGE}")


def reasons(checkpoints: Sequence[Listed], rules: Sequence[Rule]) -> dict[str, list[str]]:
    """For each checkpoint that a rule keeps, by path, the rules that do.

    Args:
        checkpoints: Complete checkpoints; those without a step are not kept by a rule.
        rules: Any of them keeps a checkpoint.

    Raises:
        OptionError: No checkpoint has a metric that a rule names.
        DamagedCheckpointError: The metrics of a checkpoint are damaged.
        UnknownMetadataError: A newer nostall has saved them.
        OSError: They cannot be read.
    """
    policies = [rule.policy for rule in rules]
    reads_metrics = any(policy.reads_metrics for policy in policies)
    # Of two checkpoints of one step, the later one says when the step was committed.
    latest = {each.step: each for each in sorted(checkpoints, key=lambda each: each.order)}
    records = [
        StepRecord(
            step=step,
            committed_at_s=latest[step].at_s,
            metrics=_metrics_of(latest[step]) if reads_metrics else {},
        )
        for step in sorted(step for step in latest if step is not None)
    ]
    unseen = unseen_metrics(policies, records)
    if unseen and records:
        has = sorted(metrics_in(records))
        raise OptionError(
            f"no checkpoint has a metric named {', '.join(unseen)}",
            hint=f"metrics found: {', '.join(has)}" if has else "a CheckpointManager saves metrics",
        )
    kept: dict[str, list[str]] = {}
    for rule in rules:
        steps = rule.policy.keeps(records)
        for each in checkpoints:
            if each.step in steps:
                kept.setdefault(each.path, []).append(rule.text)
    return kept


def _metrics_of(each: Listed) -> Mapping[str, float]:
    from nostall._manager.contents import read_about

    try:
        about = read_about(each.path)
    except FileNotFoundError:  # removed meanwhile
        return {}
    return {} if about is None else about.metrics


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
        if each.state is State.COMPLETE
        and each.step is not None
        and not each.is_inside
        and not _is_local(each)
    ]
    kept = {path: ", ".join(why) for path, why in reasons(candidates, rules).items()}
    for each in checkpoints:
        if each.state is not State.COMPLETE:
            kept[each.path] = each.state.value
        elif each.is_inside:
            kept[each.path] = "inside of another directory"
        elif _is_local(each):
            kept[each.path] = "in a local_staging_dir"
        elif each.step is None:
            kept[each.path] = "no step in its name"
        elif os.path.realpath(each.path) in linked:
            kept.setdefault(each.path, "a link leads to it")
    if newest is not None:
        kept.setdefault(newest.path, "the last complete one")
    return kept


def _is_local(each: Listed) -> bool:
    return os.path.exists(os.path.join(os.path.dirname(each.path), RECORD))


def _verified(each: Listed) -> Listed:
    """The same, but damaged if a byte differs from what was written, or unreadable."""
    from nostall.integrity import State as Found
    from nostall.integrity import verify

    if each.state is not State.COMPLETE or (found := verify(each.path)).ok:
        return each
    is_unreadable = found.state is Found.UNREADABLE
    return replace(each, state=State.UNREADABLE if is_unreadable else State.DAMAGED)


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
            print_error(
                "stopped: another process has removed or replaced the last complete checkpoint"
                " meanwhile; run prune again for the rest"
            )
            return [left.path for left in removable[position:]]
        try:
            if _unchanged(each):
                remove_checkpoint(each.path)
        except NostallError as error:
            print_error(describe(error))
    return [each.path for each in removable if look_at(each.path) is not None]


def _print(
    checkpoints: Sequence[Listed],
    kept: dict[str, str],
    gone: Sequence[Listed],
    failed: Sequence[str],
    *,
    deleted: bool,
) -> None:
    action = "removed" if deleted else "remove"
    rows = []
    for each in checkpoints:
        what = "keep" if each.path in kept else "failed" if each.path in failed else action
        size = format_size(each.nbytes)
        step = "" if each.step is None else str(each.step)
        rows.append((step, size, what, kept.get(each.path, ""), each.name))
    if rows:
        print_table(("step", "size", "action", "why", "name"), rows, right="step size")
    total = f"{counted(len(gone), 'checkpoint')}, {format_size(sum(e.nbytes for e in gone))}"
    if not (gone or failed):
        print(f"nothing to remove{_one_level_deeper(checkpoints)}")
    elif deleted:
        print(f"removed {total}")
    else:
        print(f"would remove {total}" + ("; nothing is removed without --delete" if gone else ""))


def _one_level_deeper(checkpoints: Sequence[Listed]) -> str:
    """Where ROOT may have been meant, if every checkpoint is inside of another directory."""
    if not all(each.is_inside for each in checkpoints):
        return ""
    meant = os.path.dirname(checkpoints[-1].path)
    return f": all checkpoints are one level deeper, the last in {meant}; pass that to prune it"
