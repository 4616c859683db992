"""``nostall diff A B``: differences of two checkpoints in structure and values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nostall._cli.arguments import (
    Status,
    add_json,
    add_name_filter,
    matches,
    place,
    require_chosen,
)
from nostall._cli.output import print_json, printable, progress
from nostall._model.wording import counted

if TYPE_CHECKING:
    from nostall._cli.checkpoints.checkpoint import Checkpoint, Item

_SIGNS = {"only in A": "-", "only in B": "+", "structure": "!", "values": "~"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One item that differs."""

    name: str
    where: str
    """A key of the signs."""
    what: str

    def __str__(self) -> str:
        return f"{_SIGNS[self.where]} {self.name}: {self.what}"


_OF_MANAGER = "nostall."
"""How names of a CheckpointManager's own items begin."""
HELP = "compare two checkpoints: structure, and values if asked"
DESCRIPTION = (
    "Compare names, dtypes and shapes of two checkpoints, and with --values every bit, after"
    " verifying both. A damaged checkpoint is an error. How tensors are divided into files does not"
    " matter. Exit status: 0 if nothing differs, 1 if something does. Signs: - only in A, + only in"
    " B, ! other dtype or shape, ~ other values."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("a", type=place, metavar="A", help="checkpoint directory")
    parser.add_argument("b", type=place, metavar="B", help="another one")
    parser.add_argument("--values", action="store_true", help="compare values bit by bit, too")
    add_name_filter(parser)
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Print the differences."""
    from nostall._cli.checkpoints.checkpoint import (
        read_checkpoint,
        require_complete,
        require_undamaged,
    )

    one, other = read_checkpoint(parsed.a), read_checkpoint(parsed.b)
    every = {**one.by_name, **other.by_name}  # in the order of A
    require_chosen("--name", parsed.name, every)
    names = [name for name in every if matches(name, parsed.name)]
    for checkpoint in (one, other):
        (require_undamaged if parsed.values else require_complete)(checkpoint)
    found = list(_structure(one, other, names))
    shared = sorted(set(names) - {each.name for each in found})
    if parsed.values:
        found += _values(one, other, shared)
    if parsed.json:
        print_json([{"name": e.name, "where": e.where, "what": e.what} for e in found])
    else:
        for each in found:
            print(printable(str(each)))
        compared = "names, dtypes, shapes and values" if parsed.values else "names, dtypes, shapes"
        differ = "1 differs" if len(found) == 1 else f"{len(found)} differ"
        rest = "" if parsed.values else "; values were not compared (--values does)"
        print(f"{counted(len(names), 'item')} compared by {compared}: {differ}{rest}")
    return Status.FAILED if found else Status.FINE


def _structure(one: Checkpoint, other: Checkpoint, names: list[str]) -> Iterator[Difference]:
    for name in names:
        left, right = one.by_name.get(name), other.by_name.get(name)
        if left is None:
            assert right is not None
            yield Difference(name=name, where="only in B", what=right.form)
        elif right is None:
            yield Difference(name=name, where="only in A", what=left.form)
        elif left.form != right.form:
            yield Difference(name=name, where="structure", what=f"{left.form} -> {right.form}")


def _values(one: Checkpoint, other: Checkpoint, names: list[str]) -> list[Difference]:
    from nostall._cli.checkpoints.checkpoint import in_file_order

    items = {name: one.by_name[name] for name in names}
    total = sum(item.nbytes for item in items.values())
    found, done = [], 0
    with progress("comparing") as report:
        for item in in_file_order(items):
            what = _difference(one, other, item, other.by_name[item.name])
            if what is not None and item.name.startswith(_OF_MANAGER):
                what = "the records of a CheckpointManager differ: times, metrics, random numbers"
            if what is not None:
                found.append(Difference(name=item.name, where="values", what=what))
            done += item.nbytes
            report(done, total)
    order = {name: position for position, name in enumerate(one.by_name)}
    return sorted(found, key=lambda each: order[each.name])


def _difference(one: Checkpoint, other: Checkpoint, left: Item, right: Item) -> str | None:
    """How the values of an item differ; ``None`` if no bit does."""
    from nostall._cli.checkpoints.comparing import difference
    from nostall._cli.checkpoints.reading import read_objects, read_tensor

    if left.is_tensor:
        return difference(read_tensor(one, left), read_tensor(other, right))
    same = read_objects(one, [left])[left.key] == read_objects(other, [right])[right.key]
    return None if same else "the stored objects have other bytes"
