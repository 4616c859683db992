"""The checkpoints in a directory and their states: ``ls``, ``latest``, ``verify`` and ``prune``.

States come from metadata and file sizes. Torch is imported only for checkpoints without a manifest,
to verify, and for metrics when pruning.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
import zipfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from nostall._cli.output import (
    Answer,
    NotThere,
    Status,
    format_age,
    format_metrics,
    format_size,
    plain_metrics,
    print_error,
    progress,
    table,
)
from nostall._commit.commit import Order, committed_latest_first, directories_in, found_instead
from nostall._commit.index import parsed as parsed_index
from nostall._commit.manifest import index_alone, manifest_alone
from nostall._manager.policies import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    Policy,
    StepRecord,
    metrics_in,
    unseen_metrics,
)
from nostall._model.names import (
    METADATA_NAME,
    counted,
    is_metadata_of_one_rank,
    is_ours_to_remove,
    order_of_commit,
    some,
    step_in,
)
from nostall._storage.locations import is_address, place_of, storage_at
from nostall._storage.port import PartStream, Stat, leaves_open, may_have, open_to_read
from nostall._tier.local import RECORD
from nostall.errors import (
    DamagedCheckpointError,
    NostallError,
    OptionError,
    ReadError,
    UnknownMetadataError,
)
from nostall.integrity import State as Found
from nostall.integrity import (
    Verification,
    is_complete,
    latest_complete,
    require_no_checkpoint,
    why_damaged,
)
from nostall.integrity import verify as verification
from nostall.removal import remove_checkpoint

_ABOUT = "nostall.about"
"""The item in which a CheckpointManager describes a step; see ``nostall._manager.contents``."""
_MOST_ABOUT_NBYTES = 1 << 20
"""A longer description is cut off, and is no JSON then."""


class ListedState(str, Enum):
    """State of a checkpoint directory."""

    COMPLETE = "complete"
    """Committed, and every file has its size; ``verify`` reads the bytes."""
    DAMAGED = "damaged"
    UNFINISHED = "not committed"
    """Files without metadata: a save that is in progress, or was interrupted."""
    PER_RANK = "per rank"
    """Ranks saved without coordination, each with metadata of its own."""
    NOT_UNDERSTOOD = "not understood"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A checkpoint directory."""

    path: str
    name: str
    """The path below the directory that was listed."""
    state: ListedState
    nbytes: int
    """Bytes in its files."""
    files: int
    """Number of shard files."""
    at_s: float
    """When it was committed, in seconds since the epoch; or its last change."""
    manifest: bool
    """Whether nostall has committed it."""
    link: str | None = None
    """Where a symbolic link leads that has this path; ``None`` for a directory."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that a CheckpointManager has saved, for ``ls``."""

    @property
    def step(self) -> int | None:
        """The number at the end of the name, as in ``step-100`` or ``step=100.ckpt``."""
        return step_in(self.name)

    @property
    def order(self) -> Order:
        """The place in the order of ``latest``."""
        return order_of_commit(self.path, self.at_s, is_link=self.link is not None)

    @property
    def is_inside(self) -> bool:
        """Whether it is a part of a step, or one of another root: ``latest`` does not see it."""
        return os.sep in self.name


# --- commands -------------------------------------------------------------------------------------


def ls(given: Namespace) -> Answer:
    """A row per checkpoint, the oldest first."""
    listed: Sequence[Listed | None] = list_checkpoints(given.root)
    listed = listed or [look_at(place_of(given.root))]
    found = [replace(each, metrics=metrics_of(each.path)) for each in listed if each is not None]
    if not found:
        raise NotThere(f"{given.root}: no checkpoint directories in it")
    has_metrics = any(each.metrics for each in found)
    now_s = time.time()
    rows = [
        (
            each.step,
            format_size(each.nbytes),
            each.files,
            format_age(now_s - each.at_s),
            each.state.value,
            *([format_metrics(each.metrics)] if has_metrics else []),
            each.name if each.link is None else f"{each.name} -> {each.link}",
        )
        for each in found
    ]
    columns = f">step >size >files >age state {'metrics ' if has_metrics else ''}name"
    plain = [{**asdict(e), "step": e.step, "metrics": plain_metrics(e.metrics)} for e in found]
    return Answer(plain, table(columns, rows))


def latest(given: Namespace) -> Answer:
    """The path of the last complete checkpoint."""
    root = given.root
    found = latest_complete(root, deep=given.deep)
    if found is None:
        committed = committed_latest_first(root)
        if committed:  # a job must not take this for a start from scratch
            raise DamagedCheckpointError(
                f"no complete checkpoint, but {counted(len(committed), 'damaged one')}",
                path=root,
                hint=f"`nostall verify {committed[0]}` lists the damage of the last one",
            )
        raise NotThere(f"{root}: no complete checkpoint in it{found_instead(root)}")
    return Answer({"path": found}, [found])


def verify(given: Namespace) -> Answer:
    """Differences from what was written, in one checkpoint or in each below a root."""
    path = given.path
    paths, is_root = [path], not may_have(storage_at(path), METADATA_NAME)
    if is_root:
        paths = [each.path for each in list_checkpoints(path) if not each.link]
    found = []
    for each in paths:
        with progress(f"verifying {os.path.basename(each)}") as report:
            found.append(verification(each, progress=report))
    found = [each for each in found if each.state is not Found.NOT_THERE]  # or not committed
    if not found:
        raise NotThere(f"{path}: no checkpoint was committed here{found_instead(path)}")
    states = {each.state for each in found}
    status = Status.NOT_UNDERSTOOD if Found.NOT_UNDERSTOOD in states else Status.FINE
    if states & {Found.DAMAGED, Found.UNREADABLE}:
        status = Status.FAILED
    plain = [{"ok": each.ok, **asdict(each)} for each in found]
    verdicts = [_verdict(each) for each in found]
    if is_root:
        return Answer(plain, verdicts, status)
    (one,) = found
    lines = [] if one.note is None else [f"note: {one.note}"]
    lines += [f"{'damaged' if e.is_certain else 'unreadable'}: {e}" for e in one.damages]
    if one.unchecked:
        lines.append(f"no checksum: {counted(len(one.unchecked), 'item')}: {some(one.unchecked)}")
    return Answer(plain[0], lines + verdicts, status)


def _verdict(found: Verification) -> str:
    verdict = found.state.value.upper()
    if found.ok and found.has_manifest:
        verdict = "whole, as it was written"
    elif found.ok:
        verdict = (
            "no damage found; without a manifest, only the checksums of its records were compared"
        )
    size = f"{counted(found.items, 'item')}, {counted(found.files, 'file')}, {found.nbytes} bytes"
    return f"{found.path}: {verdict}" + (f" ({size})" if found.files else "")


# --- what a directory holds -----------------------------------------------------------------------


def require_there(path: str, *, directory: bool) -> None:
    """Require that a path exists, and if asked that it is a directory; an address always passes.

    ``NotThere`` if it does not exist; ``ReadError`` if a symbolic link in it is broken, such as one
    to a volume that is not mounted; ``OptionError`` if it is a file.
    """
    if is_address(path):
        return
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        whole = Path(os.path.abspath(path))
        for each in (whole, *whole.parents):
            if each.is_symlink() and not each.exists():
                raise ReadError(
                    f"the symbolic link {each} is broken",
                    path=path,
                    hint=f"mount or make {os.readlink(each)}, or remove the link",
                ) from None
        what = "directory" if directory else "file or directory"
        raise NotThere(f"{path}: no such {what}") from None
    if directory and not is_directory:
        hint = "`nostall convert` makes a checkpoint directory of a file"
        raise OptionError("not a directory", path=path, hint=hint)


def list_checkpoints(root: str, *, deep: bool = False) -> list[Listed]:
    """The checkpoints that are subdirectories of ``root``, oldest first, also behind links.

    A subdirectory that is not a checkpoint may hold checkpoints, such as the parts
    ``step-100/model`` and ``step-100/optimizer``. ``deep`` reads every byte, except behind links.
    """
    found = []
    for path in directories_in(root):
        itself = look_at(path, deep=deep)
        if itself is not None:
            found.append(itself)
        elif not os.path.islink(path):
            with suppress(OSError):  # a file in a store, or removed meanwhile
                parts = [look_at(inner, deep=deep) for inner in directories_in(path)]
                name = os.path.basename(path)
                found += [replace(part, name=f"{name}/{part.name}") for part in parts if part]
    return sorted(found, key=lambda each: each.order)


def look_at(path: str, *, deep: bool = False) -> Listed | None:
    """The state of one directory; ``None`` if it is not a checkpoint's, or no longer exists.

    One that this user must not look into may be a checkpoint: it is unreadable.
    """
    link = os.readlink(path) if os.path.islink(path) else None
    files, manifest, at_s = storage_at(path), None, 0.0
    names: list[str] = []
    stats: dict[str, Stat] = {}
    try:
        names = files.list()
        if METADATA_NAME not in names and not any(map(is_ours_to_remove, names)):
            return None
        for name in names:
            with suppress(FileNotFoundError, ReadError):  # a directory, or removed meanwhile
                stats[name] = files.stat(name)
        last = [stats[METADATA_NAME]] if METADATA_NAME in stats else stats.values()
        at_s = max((each.modified_s for each in last), default=0.0)
        state = ListedState.UNFINISHED
        if METADATA_NAME in names:
            with open_to_read(files, METADATA_NAME) as stream:
                manifest = manifest_alone(stream)
            is_whole = why_damaged(path, deep=deep and link is None) is None
            state = ListedState.COMPLETE if is_whole else ListedState.DAMAGED
        elif any(map(is_metadata_of_one_rank, names)):
            state = ListedState.PER_RANK
    except UnknownMetadataError:
        state = ListedState.NOT_UNDERSTOOD
    except OSError as error:
        if METADATA_NAME not in names and not leaves_open(error):
            return None
        state = ListedState.UNREADABLE
        with suppress(OSError):
            at_s = os.lstat(path).st_mtime
    return Listed(
        path=path,
        name=os.path.basename(path),
        state=state,
        nbytes=sum(each.nbytes for each in stats.values()),
        files=sum(map(is_ours_to_remove, names)),
        at_s=at_s if manifest is None else manifest.committed_at_s,
        manifest=manifest is not None,
        link=link,
    )


def metrics_of(path: str) -> dict[str, float]:
    """The metrics that a CheckpointManager has saved with a checkpoint; none if it has none.

    Found by the index of the items, without torch. What cannot be read has none, too.
    """
    files = storage_at(path)
    try:
        with open_to_read(files, METADATA_NAME) as stream:
            content, manifest = index_alone(stream, path=path) or (b"", None)
        if manifest is None or _ABOUT.encode() not in content:
            return {}
        index: Any = parsed_index(content, {file.name: file.nbytes for file in manifest.files})
        at = index.first_places[index.rows[_ABOUT]]
        with closing(files.open(index.files[index.file[at]])) as source:
            part = PartStream(source, index.offset[at], index.length[at])
            with zipfile.ZipFile(part) as archive:
                (name,) = (each for each in archive.namelist() if each.endswith("/data/0"))
                with archive.open(name) as record:
                    about: Any = json.loads(record.read(_MOST_ABOUT_NBYTES))
        return {str(name): float(value) for name, value in about["metrics"].items()}
    except Exception:  # the bytes may be anything; the metrics are an extra
        return {}


# --- remove the checkpoints that no policy keeps --------------------------------------------------

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
        if any(isinstance(policy, KeepBest) for policy in policies.values()):
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
        if each.state is not ListedState.COMPLETE:
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
    complete = (e for e in checkpoints if e.state is ListedState.COMPLETE and not e.is_inside)
    return max(complete, key=lambda each: each.order, default=None)


def _remove(removable: Sequence[Listed], newest: Listed | None) -> list[str]:
    """Remove checkpoints; returns the paths of those that still exist."""
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
