"""The mappings of metadata, whose values are made on demand: dictionaries to whoever uses them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

import nostall
from nostall._commit.index.items import Items

STATE = {"b": torch.arange(6.0), "a": {"c": torch.zeros(2, 3), "object": "text"}}


def mappings_of(path: Path) -> tuple[list[dict[Any, Any]], list[dict[Any, Any]]]:
    """Entries and places as nostall's reader gives them, and as plain dictionaries."""
    one, other = (nostall.FileSystemReader(path).read_metadata() for _ in range(2))
    stock = dcp.FileSystemReader(path).read_metadata()
    plain = [dict(other.state_dict_metadata.items()), dict(other.storage_data.items())]
    assert plain == [stock.state_dict_metadata, stock.storage_data]
    return [one.state_dict_metadata, one.storage_data], plain


USES: list[Callable[[dict[Any, Any]], Any]] = [
    bool,
    len,
    list,
    dict,
    copy.copy,
    copy.deepcopy,
    lambda d: {**d},
    lambda d: d | {"more": 1},
    lambda d: {"more": 1} | d,
    lambda d: d.__ior__({"more": 1}),
    lambda d: list(d.keys()),
    lambda d: d.keys() & {next(iter(d)), "absent"},
    lambda d: list(d.values()),
    lambda d: list(d.items()),
    lambda d: list(reversed(d)),
    lambda d: pickle.loads(pickle.dumps(d)),
    lambda d: d.pop(next(iter(d))),
    lambda d: d.pop("absent", None),
    lambda d: d.popitem(),
    lambda d: d.setdefault(next(iter(d)), 3),
    lambda d: d.setdefault("more", 3),
    lambda d: d.update({"more": 1}),
    lambda d: d.update(more=1),
    lambda d: d.clear(),
    lambda d: d.__delitem__(next(iter(d))),
    lambda d: d.__setitem__("more", 1),
    lambda d: d.get("absent", 5),
    lambda d: d.get(next(iter(d))),
    lambda d: "absent" in d,
    lambda d: (len(list(d.items())), d.get("absent", 5), "absent" in d),
    lambda d: all(key in d for key in list(d)),
    lambda d: [d[key] for key in list(d)],
    repr,
]


@pytest.mark.parametrize("use", USES, ids=map(str, range(len(USES))))
@pytest.mark.parametrize("looked_up", [0, 1, 2])
def test_whoever_uses_a_mapping_sees_all_of_it(tmp_path: Path, use: Any, looked_up: int) -> None:
    """Each use of a dictionary, before and after some values were asked for."""
    dcp.save(STATE, storage_writer=nostall.FileSystemWriterAsync(tmp_path), no_dist=True)
    for lazy, plain in zip(*mappings_of(tmp_path), strict=True):
        for key in list(plain)[::-1][:looked_up]:
            assert lazy[key] == plain[key]
        assert use(lazy) == use(plain)
        assert lazy == plain
        assert plain == lazy
        assert list(lazy.items()) == list(plain.items())
        indices = [key for key in lazy if isinstance(key, MetadataIndex)]
        assert [each.index for each in indices] == [
            key.index for key in plain if isinstance(key, MetadataIndex)
        ]  # keys are equal without them


def test_mappings_are_compared_and_merged_with_each_other(tmp_path: Path) -> None:
    """Neither of them is complete before."""
    dcp.save(STATE, storage_writer=nostall.FileSystemWriterAsync(tmp_path), no_dist=True)
    (one, places), plain = mappings_of(tmp_path)
    assert one == mappings_of(tmp_path)[0][0]
    assert places == mappings_of(tmp_path)[0][1]
    assert {} | mappings_of(tmp_path)[0][1] == plain[1]
    merged: dict[Any, Any] = {}
    merged.update(mappings_of(tmp_path)[0][1])
    assert merged == plain[1]
    other = mappings_of(tmp_path)[0][0]
    other.update(mappings_of(tmp_path)[0][0])
    assert other == plain[0]


def test_a_load_makes_the_items_of_its_state_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stock's planner, of a checkpoint with many others."""
    state = {f"w{number}": torch.full((3,), float(number)) for number in range(100)}
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(tmp_path), no_dist=True)
    made = []
    entry = Items.entry

    def counted(items: Items, row: int) -> Any:
        made.append(row)
        return entry(items, row)

    monkeypatch.setattr(Items, "entry", counted)
    some = {"w7": torch.zeros(3), "w70": torch.zeros(3)}
    dcp.load(some, storage_reader=nostall.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(some["w70"], state["w70"])
    assert sorted(made) == [7, 70]
