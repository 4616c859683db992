"""``prune``: remove the checkpoints that no policy keeps. Only metrics and removal need torch."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress

from nostall._cli.listing import Listed, State, list_checkpoints, look_at
from nostall._cli.output import Answer, NotThere, Status, format_size, print_error, table
from nostall._commit.committed import found_instead
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
from nostall._storage.locations import place_of
from nostall.errors import NostallError, OptionError
from nostall.integrity import is_complete, require_no_checkpoint
from nostall.tier._local import RECORD

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BEST = re.compile(r"(\d+):(.+?)(?::(min|max))?")
POLICIES = (
    "latest=3: the 3 highest steps; best=2:loss, or best=2:loss:max: the 2 steps with the lowest or"
    " highest value of a metric saved by a CheckpointManager; every=1000: steps that are multiples"
    " of 1000; every=6h: one in 6 hours (s, m, h, d); separated by commas, any of them keeps a"
    " checkpoint"
)
"""The form of ``--keep``, by examples."""


def prune(given: Namespace) -> Answer:
    """Show what is kept and why, and what is removed, or would be without ``--delete``."""
    root, deletes = given.root, given.delete
    listed = list_checkpoints(root, deep=given.deep)
    linked = {os.path.realpath(each.path) for each in listed if each.link is not None}
    checkpoints = [each for each in listed if each.link is None]
    if not checkpoints:
        require_no_checkpoint(place_of(root))
        raise NotThere(f"{root}: no checkpoint directories in it{found_instead(root)}")
    policies = {text: policy for group in given.keep for text, policy in group.items()}
    kept = why_kept(checkpoints, policies, linked)
    removable = [each for each in checkpoints if each.path not in kept]
    failed = _remove(removable, _newest_complete(checkpoints)) if deletes else []
    gone = [each for each in removable if each.path not in failed]

    done = "removed" if deletes else "would_remove"
    actions = dict.fromkeys(kept, "keep") | dict.fromkeys(failed, "failed")
    rest = "removed" if deletes else "remove"
    rows = [
        (e.step, format_size(e.nbytes), actions.get(e.path, rest), kept.get(e.path), e.name)
        for e in checkpoints
    ]
    total = f"{counted(len(gone), 'checkpoint')}, {format_size(sum(e.nbytes for e in gone))}"
    summary = f"would remove {total}; nothing is removed without --delete"
    if not removable:
        summary = "nothing to remove"
    elif deletes:
        summary = f"removed {total}"
    return Answer(
        {"kept": kept, done: [each.path for each in gone], "failed": failed},
        [*table(">step >size action why name", rows), summary],
        Status.FAILED if failed else Status.FINE,
    )


def parse_policies(text: str) -> dict[str, Policy]:
    """Policies from ``latest=3,every=1000``, by the text of each; for argparse."""
    return {part.strip(): _policy(part.strip()) for part in text.split(",")}


def _policy(text: str) -> Policy:
    kind, _, value = text.partition("=")
    best = _BEST.fullmatch(value)
    with suppress(OptionError, ValueError):  # the latter for what is no number
        if kind == "latest":
            return KeepLatest(int(value))
        if kind == "best" and best is not None:
            return KeepBest(int(best[1]), best[2], "max" if best[3] == "max" else "min")
        if kind == "every" and value[-1:] in _UNITS_S:
            return KeepEvery(seconds=int(value[:-1]) * _UNITS_S[value[-1]])
        if kind == "every":
            return KeepEvery(steps=int(value))
    raise ArgumentTypeError(f"{text!r} is not a policy; write {POLICIES}")


def reasons(checkpoints: Iterable[Listed], policies: Mapping[str, Policy]) -> dict[str, str]:
    """For each complete checkpoint that a policy keeps, by path, the policies that do.

    ``OptionError`` if no checkpoint has a metric that a policy names.
    """
    # Of two checkpoints of one step, the later one says when the step was committed.
    in_order = sorted(checkpoints, key=lambda each: each.order)
    by_step = {each.step: each for each in in_order if each.step is not None}
    records = []
    for step, each in sorted(by_step.items()):
        about = None
        if any(policy.reads_metrics for policy in policies.values()):
            from nostall._manager.contents import read_about

            with suppress(FileNotFoundError):  # removed meanwhile
                about = read_about(each.path)
        metrics = {} if about is None else about.metrics
        records.append(StepRecord(step=step, committed_at_s=each.at_s, metrics=metrics))
    unseen = unseen_metrics(policies.values(), records)
    if unseen and records:
        has = sorted(metrics_in(records))
        raise OptionError(
            f"no checkpoint has a metric named {', '.join(unseen)}",
            hint=f"metrics found: {', '.join(has)}" if has else "a CheckpointManager saves metrics",
        )
    kept = {text: policy.keeps(records) for text, policy in policies.items()}
    why = {e.path: [text for text, steps in kept.items() if e.step in steps] for e in checkpoints}
    return {path: ", ".join(texts) for path, texts in why.items() if texts}


def why_kept(
    checkpoints: Sequence[Listed], policies: Mapping[str, Policy], linked: Set[str]
) -> dict[str, str]:
    """The checkpoints that stay, by path, with the reason; any policy keeps a checkpoint.

    ``linked`` are real paths that are in use under another name.
    """
    kept, candidates = {}, []
    for each in checkpoints:
        if each.state is not State.COMPLETE:
            kept[each.path] = each.state.value
        elif each.is_inside:
            kept[each.path] = "inside of another directory"
        elif os.path.exists(os.path.join(os.path.dirname(each.path), RECORD)):
            kept[each.path] = "in a local_staging_dir"
        elif each.step is None:
            kept[each.path] = "no step in its name"
        else:
            candidates.append(each)
    kept |= reasons(candidates, policies)
    newest = _newest_complete(checkpoints)
    for each in candidates:
        if os.path.realpath(each.path) in linked:
            kept.setdefault(each.path, "a link leads to it")
        elif each is newest:
            kept.setdefault(each.path, "the last complete one")
    return kept


def _newest_complete(checkpoints: Iterable[Listed]) -> Listed | None:
    """The last committed complete checkpoint directly in the directory, as ``latest`` prints it."""
    complete = (e for e in checkpoints if e.state is State.COMPLETE and not e.is_inside)
    return max(complete, key=lambda each: each.order, default=None)


def _remove(removable: Sequence[Listed], newest: Listed | None) -> list[str]:
    """Remove checkpoints; returns the paths of those that still exist."""
    from nostall.removal import remove_checkpoint

    for each in removable:
        # Another process may have removed or replaced either of them meanwhile.
        if newest is None or not is_complete(newest.path):
            print_error(
                "stopped: another process has removed or replaced the last complete checkpoint"
                " meanwhile; run prune again for the rest"
            )
            break
        now = look_at(each.path)
        if now is None or (now.state, now.at_s) != (each.state, each.at_s):
            continue
        try:
            remove_checkpoint(each.path)
        except NostallError as error:
            print_error(error)
    return [each.path for each in removable if look_at(each.path) is not None]
