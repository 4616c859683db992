"""The pickle of metadata: what comes out of it, for whoever reads it."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.local_plans import LocalPlans
from nostall._commit.metadata import PLANS_KEY, load_metadata
from nostall._commit.publication import complete_metadata, publication_of
from nostall._commit.results import ResultColumns, in_columns
from support.indexes import metadata, small


def plain(value: Any) -> Any:
    """All that an object of metadata has, with types, and in its order."""
    if isinstance(value, Mapping):
        return dict, [(plain(key), plain(each)) for key, each in value.items()]
    if isinstance(value, list):
        return list, [plain(each) for each in value]
    if isinstance(value, TensorProperties):
        return TensorProperties, value.__getstate__()
    if hasattr(value, "__dict__"):
        return type(value), sorted((name, plain(each)) for name, each in vars(value).items())
    return type(value), value


def parts_of(found: Metadata) -> list[Any]:
    """All parts of metadata, made comparable; a pickle does not say that there is no transform."""
    places = found.storage_data
    assert places is not None
    for place in places.values():
        vars(place).setdefault("transform_descriptors", None)
    return [
        plain(found.state_dict_metadata),
        plain(places),
        plain(found.planner_data),
        found.version if hasattr(found, "version") else None,
    ]


def in_any_order(parts: list[Any]) -> list[Any]:
    """Metadata whose places come rank by rank."""
    entries, (kind, places), *rest = parts
    return [entries, (kind, sorted(places, key=repr)), *rest]


def content_of(found: Metadata) -> bytes:
    """The bytes that a commit writes for metadata, without a manifest."""
    return b"".join(publication_of(found).content(None))


def in_a_save(found: Metadata) -> Metadata:
    """Metadata with the results of ranks as the coordinator has them."""
    ranks: dict[str, list[WriteResult]] = {}
    assert found.storage_data is not None
    for index, info in found.storage_data.items():
        result = WriteResult(index=index, size_in_bytes=info.length, storage_data=info)
        ranks.setdefault(info.relative_path, []).append(result)
    sent = [pickle.loads(pickle.dumps(in_columns(results))) for results in ranks.values()]
    return complete_metadata(found, sent)


def tall(nitems: int, nchunks: int) -> Metadata:
    """Tensors with many chunks."""
    entries: dict[str, Any] = {}
    places = {}
    for item in range(nitems):
        name = f"w{item}"
        offsets = [torch.Size((row, 0)) for row in range(nchunks)]
        chunks = [ChunkStorageMetadata(each, torch.Size((1, 8))) for each in offsets]
        size = torch.Size((nchunks, 8))
        entries[name] = TensorStorageMetadata(TensorProperties(), size, chunks)
        for row, each in enumerate(offsets):
            info = _torch.StorageInfo(f"__{row}_0.distcp", item * 100, 100)
            places[MetadataIndex(name, each, row)] = info
    return Metadata(entries, storage_data=places)


@given(metadata())
def test_it_is_what_pickle_makes(original: Metadata) -> None:
    """Every attribute of every object, with its type; for torch's reader and for ours."""
    *expected, _ = parts_of(pickle.loads(pickle.dumps(original)))
    for finished in (original, in_a_save(original)):
        content = content_of(finished)
        for read in (pickle.loads(content), load_metadata(content, path="")):
            *found, _ = parts_of(read)
            assert in_any_order(found) == in_any_order(expected)


def test_equal_sizes_are_one_object() -> None:
    """They take most of the memory of who loads it."""
    found = pickle.loads(content_of(in_a_save(tall(100, 100))))
    (first, second, *_) = (entry.chunks[7] for entry in found.state_dict_metadata.values())
    assert first.offsets is second.offsets
    assert first.sizes is second.sizes
    keys = [key for key in found.storage_data if key.offset == first.offsets]
    assert len(keys) == 100
    assert all(key.offset is first.offsets for key in keys)


def test_it_leaves_no_objects_behind() -> None:
    """A coordinator keeps results as columns, in a tenth of the memory."""
    publication = publication_of(in_a_save(tall(2, 3)))
    assert all(isinstance(each, ResultColumns) for each in publication.places)


def test_changed_places_are_pickled() -> None:
    """Places that somebody has looked at, and of which one was changed."""
    finished = in_a_save(small())
    places = finished.storage_data
    assert places is not None
    places[MetadataIndex("lr")].offset = 77
    assert pickle.loads(content_of(finished)).storage_data[MetadataIndex("lr")].offset == 77


def test_attributes_beside_entries_and_places_stay() -> None:
    """Also those that the class does not declare, and an item of an attribute's name."""
    original = small()
    original.state_dict_metadata["size"] = original.state_dict_metadata.pop("lr")
    original.storage_data[MetadataIndex("size")] = original.storage_data.pop(MetadataIndex("lr"))
    original.planner_data = {"size": ("a", 1), "weight": ("weight",)}
    plans = [SavePlan([WriteItem(MetadataIndex("a"), WriteItemType.BYTE_IO)]), SavePlan([])]
    original.all_local_plans = plans  # type: ignore[attr-defined]  # as frameworks do
    original.more = {"kept": 7}  # type: ignore[attr-defined]  # as they may
    found = pickle.loads(content_of(original))
    assert LocalPlans.of_plain(found.planner_data.pop(PLANS_KEY)) == plans
    assert found.planner_data == original.planner_data
    assert found.more == {"kept": 7}
    assert found.state_dict_metadata == original.state_dict_metadata
    assert found.storage_data == original.storage_data


def with_a_far_offset(found: Metadata) -> None:
    for place in found.storage_data.values():
        place.offset += 1 << 63


def with_a_large_hint(found: Metadata) -> None:
    entry = found.storage_data.pop(MetadataIndex("step", torch.Size(()), 0))
    found.storage_data[MetadataIndex("step", torch.Size(()), 1 << 63)] = entry


def with_transforms(found: Metadata) -> None:
    for place in found.storage_data.values():
        place.transform_descriptors = ["safetensors"]


def with_a_hint_that_is_no_integer(found: Metadata) -> None:
    entry = found.storage_data.pop(MetadataIndex("step", torch.Size(()), 0))
    found.storage_data[MetadataIndex("step", torch.Size(()), True)] = entry


def with_an_ordered_dictionary(found: Metadata) -> None:
    found.state_dict_metadata = OrderedDict(found.state_dict_metadata)


def with_a_tuple_of_chunks(found: Metadata) -> None:
    weight: Any = found.state_dict_metadata["weight"]
    weight.chunks = tuple(weight.chunks)


def with_an_attribute_of_a_key(found: Metadata) -> None:
    next(iter(found.storage_data)).__dict__["more"] = 1


def with_an_attribute_of_a_place(found: Metadata) -> None:
    place = pickle.loads(pickle.dumps(found.storage_data.pop(MetadataIndex("lr"))))
    place.more = 1
    found.storage_data[MetadataIndex("lr")] = place


def with_an_offset_that_is_a_tuple(found: Metadata) -> None:
    next(iter(found.storage_data)).__dict__["offset"] = (0, 0)


def with_another_kind_of_text(found: Metadata) -> None:
    next(iter(found.storage_data)).__dict__["fqn"] = Text("weight")


def with_properties_that_are_equal_only(found: Metadata) -> None:
    weight: Any = found.state_dict_metadata["weight"]
    step: Any = found.state_dict_metadata["step"]
    weight.properties.requires_grad = True
    step.properties = TensorProperties(requires_grad=True)
    step.properties.requires_grad = 1


def with_a_size_of_other_numbers(found: Metadata) -> None:
    weight: Any = found.state_dict_metadata["weight"]
    weight.size = torch.Size((Number.TWO, 3))


class Number(IntEnum):
    TWO = 2


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "change",
    [
        with_a_far_offset,
        with_a_large_hint,
        with_transforms,
        with_a_hint_that_is_no_integer,
        with_an_ordered_dictionary,
        with_a_tuple_of_chunks,
        with_an_attribute_of_a_key,
        with_an_attribute_of_a_place,
        with_an_offset_that_is_a_tuple,
        with_another_kind_of_text,
        with_properties_that_are_equal_only,
        with_a_size_of_other_numbers,
    ],
)
def test_what_is_unusual_is_pickled_as_it_is(change: Callable[[Metadata], None]) -> None:
    """Also what is only equal to what is usual."""
    original = small()
    change(original)
    expected = parts_of(pickle.loads(pickle.dumps(original)))
    assert parts_of(pickle.loads(content_of(original))) == expected


class Counted(Metadata):
    """Metadata of a planner's own class, whose pickle depends on the entries."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "count": len(self.state_dict_metadata)}


def test_metadata_of_another_class_is_pickled_by_it() -> None:
    """Its own methods may want all of it."""
    original = Counted(**vars(small()))
    assert pickle.loads(content_of(original)).count == 3


def test_entries_that_are_alike_stay_apart() -> None:
    """Who changes the properties of one changes no other."""
    found = pickle.loads(content_of(tall(2, 1)))
    found.state_dict_metadata["w0"].properties.dtype = torch.bfloat16
    assert found.state_dict_metadata["w1"].properties.dtype == torch.float32


def test_files_are_renamed_in_it() -> None:
    """Each save of a known structure renames the files of the one before; all else stays equal."""
    original = tall(3, 2)
    publication = publication_of(in_a_save(original))
    for suffix in ("-89abcdef", "-01234567-89abcdef", ""):
        names = {name: f"{name[:5]}{suffix}.distcp" for name in publication.files}
        renamed = publication.renamed(names)
        assert renamed is not None
        found = pickle.loads(b"".join(renamed.content(None)))
        assert found.state_dict_metadata == original.state_dict_metadata
        for key, place in original.storage_data.items():
            expected = f"{place.relative_path[:5]}{suffix}.distcp"
            assert found.storage_data[key].relative_path == expected
        publication = renamed
