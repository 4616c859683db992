"""``nostall inspect PATH``: what is in a checkpoint."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from nostall._cli.arguments import (
    Status,
    add_json,
    add_name_filter,
    at_least,
    checked,
    matches,
    parse_nbytes,
    place,
    require_chosen,
)
from nostall._cli.output import format_size, print_json, print_table, printable
from nostall._model.wording import counted

if TYPE_CHECKING:
    from nostall._cli.checkpoints.checkpoint import Checkpoint, Item

HELP = "show names, shapes, dtypes, sharding, files and sizes"
DESCRIPTION = (
    "Show the items of a checkpoint. Only its metadata is read, and the sizes of its files. Size is"
    " what an item takes in files. Sharding is the number of stored parts along each dimension."
    " Exit status: 1 if a file is missing or has another size."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", type=place, metavar="PATH", help="checkpoint directory")
    parser.add_argument("--tree", action="store_true", help="add up sizes by parts of names")
    parser.add_argument(
        "--depth",
        type=at_least(1),
        metavar="N",
        help="like --tree, with at most N parts of each name",
    )
    add_json(parser)
    add_name_filter(parser)
    add = parser.add_argument
    add("--dtype", metavar="DTYPE", help="only this dtype, as in bfloat16; 'object' for objects")
    add("--file", metavar="PATTERN", help="only items with a part in such a file")
    add("--larger", type=checked(parse_nbytes), metavar="SIZE", help="only from this size on")
    add("--sort", choices=("name", "size"), help="default: the order in which they were saved")


def run(parsed: argparse.Namespace) -> int:
    """Print items as a table, a tree or JSON."""
    from nostall._cli.checkpoints.checkpoint import damage_of, read_checkpoint

    checkpoint = read_checkpoint(parsed.path)
    items = _chosen(checkpoint, parsed)
    require_chosen("--name", parsed.name, checkpoint.by_name)
    kinds = dict.fromkeys(item.kind for item in checkpoint.items)
    require_chosen("--dtype", [] if parsed.dtype is None else [parsed.dtype], kinds)
    files = dict.fromkeys(file for item in checkpoint.items for file in item.files)
    require_chosen("--file", [] if parsed.file is None else [parsed.file], files)
    damage = damage_of(checkpoint)
    if parsed.json:
        _print_json(checkpoint, items, None if damage is None else damage.message)
    else:
        _print(checkpoint, items, parsed)
    if damage is not None:
        raise damage
    return Status.FINE


def _print(checkpoint: Checkpoint, items: Sequence[Item], parsed: argparse.Namespace) -> None:
    if parsed.tree or parsed.depth is not None:
        _print_tree(items, parsed.depth)
    elif items:
        rows = [
            (
                item.name,
                item.kind,
                str(list(item.shape)) if item.is_tensor else "",
                item.sharding,
                format_size(item.nbytes),
                _few(item.files),
            )
            for item in items
        ]
        print_table(("name", "dtype", "shape", "sharding", "size", "files"), rows, right="size")
    _print_summary(checkpoint, items)


def _chosen(checkpoint: Checkpoint, parsed: argparse.Namespace) -> list[Item]:
    items = [
        item
        for item in checkpoint.items
        if matches(item.name, parsed.name)
        and parsed.dtype in (None, item.kind)
        and (parsed.file is None or any(matches(file, [parsed.file]) for file in item.files))
        and item.nbytes >= (parsed.larger or 0)
    ]
    if parsed.sort == "name":
        items.sort(key=lambda item: item.name)
    elif parsed.sort == "size":
        items.sort(key=lambda item: -item.nbytes)
    return items


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else ""


def _print_summary(checkpoint: Checkpoint, items: Sequence[Item]) -> None:
    tensors = sum(item.is_tensor for item in items)
    files = {file for item in items for file in item.files}
    all_items = "" if len(items) == len(checkpoint.items) else f" (of {len(checkpoint.items)})"
    parts = [
        f"{counted(tensors, 'tensor')}, {counted(len(items) - tensors, 'object')}{all_items}",
        f"{format_size(sum(item.nbytes for item in items))} in {counted(len(files), 'file')}",
    ]
    manifest = checkpoint.manifest
    if manifest is None:
        parts.append("without a manifest")
    else:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.committed_at_s))
        parts.append(f"committed {at} by nostall {printable(manifest.version)}")
    print("; ".join(parts))


def _print_json(checkpoint: Checkpoint, items: Sequence[Item], damage: str | None) -> None:
    manifest = checkpoint.manifest
    print_json(
        {
            "path": checkpoint.path,
            "committed_at_s": None if manifest is None else manifest.committed_at_s,
            "nostall": None if manifest is None else manifest.version,
            "damage": damage,
            "items": [
                {
                    "name": item.name,
                    "dtype": item.kind,
                    "shape": list(item.shape) if item.is_tensor else None,
                    "nbytes": item.nbytes,
                    "parts": [asdict(part) for part in item.parts],
                }
                for item in items
            ],
        }
    )


@dataclass(slots=True)
class _Branch:
    nbytes: int = 0
    items: int = 0
    form: str = ""
    """Dtype and shape, if an item ends here."""
    children: dict[str, _Branch] = field(default_factory=dict)


def _print_tree(items: Sequence[Item], depth: int | None) -> None:
    root = _Branch()
    for item in items:
        branch = root
        for part in item.name.split(".")[:depth]:
            branch = branch.children.setdefault(part, _Branch())
            branch.nbytes += item.nbytes
            branch.items += 1
        if depth is None or item.name.count(".") < depth:
            branch.form = item.form
    rows: list[tuple[str, str, str]] = []
    waiting = [(name, child, 0) for name, child in reversed(root.children.items())]
    while waiting:  # names may be deeper than the stack
        name, branch, level = waiting.pop()
        what = branch.form or counted(branch.items, "item")
        rows.append(("  " * level + name, format_size(branch.nbytes), what))
        children = reversed(branch.children.items())
        waiting += [(inner, child, level + 1) for inner, child in children]
    if rows:
        print_table(("name", "size", "what"), rows, right="size")
