"""Metadata that a commit publishes: the results of all ranks, and their pickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.columns import (
    LocalPlans,
    ResultColumns,
    Results,
    ResultsReference,
    StorageData,
    in_columns,
)
from nostall._commit.metadata import PLANS_KEY, load_metadata
from nostall._commit.publication import KnownResults, complete_metadata, publication_of
from support.indexes import metadata, small
from support.states import small_state


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
    return [plain(each) for each in (found.state_dict_metadata, places, found.planner_data)]


def in_any_order(parts: list[Any]) -> list[Any]:
    """Metadata whose places come rank by rank."""
    entries, (kind, places), *rest = parts
    return [entries, (kind, sorted(places, key=repr)), *rest]


def content_of(found: Metadata) -> bytes:
    """The bytes that a commit writes for metadata, without a manifest."""
    return b"".join(publication_of(found).content(None))


def in_a_save(found: Metadata) -> Metadata:
    """Metadata with the results of ranks as the coordinator has them."""
    return complete_metadata(found, list(map(sent, results_of(found))))


def tall(nitems: int, nchunks: int) -> Metadata:
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
    expected = parts_of(pickle.loads(pickle.dumps(original)))
    for finished in (original, in_a_save(original)):
        content = content_of(finished)
        for read in (pickle.loads(content), load_metadata(content, path="")):
            assert in_any_order(parts_of(read)) == in_any_order(expected)


def test_equal_sizes_are_one_object() -> None:
    """They take most of the memory of who loads it."""
    found = pickle.loads(content_of(in_a_save(tall(100, 100))))
    (first, second, *_) = (entry.chunks[7] for entry in found.state_dict_metadata.values())
    assert first.offsets is second.offsets
    assert first.sizes is second.sizes
    keys = [key for key in found.storage_data if key.offset == first.offsets]
    assert len(keys) == 100
    assert all(key.offset is first.offsets for key in keys)


def test_changed_places_are_pickled() -> None:
    """Places that somebody has looked at, and of which one was changed."""
    finished = in_a_save(small())
    places = finished.storage_data
    assert places is not None
    places[MetadataIndex("lr")].offset = 77
    assert pickle.loads(content_of(finished)).storage_data[MetadataIndex("lr")].offset == 77


def test_attributes_beside_entries_and_places_stay() -> None:
    """Also undeclared ones, and plans, which stock sees as one more entry of its dictionary."""
    original = small()
    original.state_dict_metadata["size"] = original.state_dict_metadata.pop("lr")
    original.storage_data[MetadataIndex("size")] = original.storage_data.pop(MetadataIndex("lr"))
    original.planner_data = {"size": ("a", 1), "weight": ("weight",)}
    planner = DefaultSavePlanner()
    planner.set_up_planner(small_state(), is_coordinator=True)
    plans = [planner.create_local_plan(), SavePlan([])]
    original.all_local_plans = plans  # type: ignore[attr-defined]  # as frameworks do
    original.more = {"kept": 7}  # type: ignore[attr-defined]  # as they may
    content = content_of(original)
    loaded: Any = load_metadata(content, path="p")
    assert loaded.all_local_plans == plans
    assert loaded.planner_data == original.planner_data
    found = pickle.loads(content)
    assert LocalPlans.of_plain(found.planner_data.pop(PLANS_KEY)) == plans
    assert found.planner_data == original.planner_data
    assert found.more == {"kept": 7}
    assert found.state_dict_metadata == original.state_dict_metadata
    assert found.storage_data == original.storage_data


class Text(str):
    __slots__ = ()


def of_a_key(**attributes: Any) -> Callable[[Metadata], None]:
    """Other attributes of the first place's index."""
    return lambda found: vars(next(iter(found.storage_data))).update(attributes)


def an_attribute_of_a_place(found: Metadata) -> None:
    place = pickle.loads(pickle.dumps(found.storage_data.pop(MetadataIndex("lr"))))
    place.more = 1
    found.storage_data[MetadataIndex("lr")] = place


UNUSUAL: dict[str, Callable[[Metadata], None]] = {
    "an attribute of a key": of_a_key(more=1),
    "a hint that is no integer": of_a_key(index=True),
    "an offset that is a tuple": of_a_key(offset=(0, 0)),
    "another kind of text": of_a_key(fqn=Text("weight")),
    "an attribute of a place": an_attribute_of_a_place,
}


@pytest.mark.parametrize("change", UNUSUAL.values(), ids=UNUSUAL)
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


def renamed(original: Metadata, names: dict[str, str]) -> Metadata:
    """The metadata, with other names of its files."""
    twin = deepcopy(original)
    for place in twin.storage_data.values():
        place.relative_path = names[place.relative_path]
    return twin


@pytest.mark.parametrize(
    ("made", "nitems"), [(in_a_save, 3), (lambda found: found, 1)], ids=["columns", "objects"]
)
def test_files_are_renamed_in_it(made: Callable[[Metadata], Metadata], nitems: int) -> None:
    """Byte for byte what pickling it anew gives, as each save of a known structure needs it."""
    original = tall(nitems, 2)
    publication = publication_of(made(original))
    for form in ("__{}_0-89abcdef", "__{}_0-01234567-89abcdef", "__{}_0", "long-{}_0", "é{}"):
        names = {
            name: f"{form.format(number)}.distcp"
            for number, name in enumerate(sorted(publication.files))
        }
        original = renamed(original, names)
        anew, again = publication_of(made(original)), publication.renamed(names)
        assert again is not None
        assert b"".join(again.content(None)) == b"".join(anew.content(None))
        assert (again.files, again.index) == (anew.files, anew.index)
        assert again.storage_data == anew.storage_data == original.storage_data
        assert pickle.loads(pickle.dumps(again.storage_data)) == original.storage_data
        publication = again


def test_a_name_that_may_be_something_else_is_not_replaced() -> None:
    """An item that is called as a file is: its metadata is made anew then."""
    ambiguous = small()
    ambiguous.state_dict_metadata["__0_0.distcp"] = ambiguous.state_dict_metadata.pop("lr")
    place = ambiguous.storage_data.pop(MetadataIndex("lr"))
    ambiguous.storage_data[MetadataIndex("__0_0.distcp")] = place
    assert publication_of(ambiguous).renamed({"__0_0.distcp": "b.distcp"}) is None


# --- results that ranks send as columns ----------------------------------------------------------


def results_of(found: Metadata) -> list[list[WriteResult]]:
    """The write results of two ranks or more, each of which wrote one file."""
    ranks: dict[str, list[WriteResult]] = {"__0_0.distcp": [], "__1_0.distcp": []}
    for index, info in found.storage_data.items():
        result = WriteResult(index=index, size_in_bytes=info.length, storage_data=info)
        ranks.setdefault(info.relative_path, []).append(result)
    return list(ranks.values())


def places_of(results: list[WriteResult]) -> dict[MetadataIndex, Any]:
    """Results in the form of those that are unusual."""
    return {each.index: each.storage_data for each in results}


def sent(results: list[WriteResult]) -> Any:
    """Results after their transfer to the coordinator, as columns."""
    return pickle.loads(pickle.dumps(in_columns(results)))


@given(metadata())
def test_metadata_of_columns_are_those_of_results(found: Metadata) -> None:
    """Byte for byte, hints and order included, with the same index, whoever makes the columns."""
    results = results_of(found)
    plain = publication_of(complete_metadata(found, list(map(in_columns, results))))
    compact = publication_of(complete_metadata(found, list(map(sent, results))))
    assert compact.content(None) == plain.content(None)
    assert (compact.index, compact.files) == (plain.index, plain.files)
    assert compact.is_renamable == plain.is_renamable
    assert isinstance(compact.storage_data, StorageData)
    assert [*compact.storage_data.items()] == [*plain.storage_data.items()]


@given(found=metadata(), convert=st.sampled_from([in_columns, places_of]))
def test_later_saves_have_other_file_names(
    found: Metadata, convert: Callable[[list[WriteResult]], Any]
) -> None:
    """Also if a rank was planned anew, and the coordinator has earlier results of the others."""
    known, results = KnownResults(), results_of(found)
    files = [(f"__{rank}_0.distcp",) for rank in range(2)]
    first = [
        Results(items=convert(of_rank), files=files[rank], token=f"{rank}")
        for rank, of_rank in enumerate(results)
    ]
    known.fill_in(first)
    later = [ResultsReference(token=f"{rank}", files=(f"{rank}.distcp",)) for rank in range(2)]
    present: Any = known.under_new_names(later, known.fill_in(later))  # type: ignore[arg-type]  # none has failed
    places = complete_metadata(found, present).storage_data
    assert places == {
        index: replace(info, relative_path=f"{info.relative_path[2]}.distcp")
        for of_rank in results
        for index, info in ((each.index, each.storage_data) for each in of_rank)
    }


def test_places_are_a_callers_own() -> None:
    """Made when somebody looks; changes are not the next save's, and copies are dictionaries."""
    found = small()
    (results, _) = results_of(found)
    expected = places_of(results)
    publication = publication_of(complete_metadata(found, [sent(results)]))
    mine: Any = publication.storage_data
    assert type(mine) is StorageData
    assert "in_full" not in vars(mine)
    assert len(mine) == 4
    assert mine[results[0].index] is mine[results[0].index]
    for copied in (copy(mine), deepcopy(mine), pickle.loads(pickle.dumps(mine)), mine.copy()):
        assert type(copied) is dict
        assert copied == expected
    mine[results[0].index] = mine.pop(results[1].index)
    del mine[results[2].index]
    assert len(mine) == 2
    assert mine[results[0].index] == results[1].storage_data
    assert publication.storage_data == expected


def with_place(results: list[WriteResult], **changes: Any) -> None:
    results[0] = replace(results[0], storage_data=replace(results[0].storage_data, **changes))


def with_result(results: list[WriteResult], **changes: Any) -> None:
    results[0] = replace(results[0], **changes)


UNUSUAL_RESULTS: dict[str, Callable[[list[WriteResult]], None]] = {
    "a place of a user's": lambda results: with_result(results, storage_data=("file", 0, 100)),
    "a name that is no text": lambda results: with_result(
        results,
        index=MetadataIndex(b"lr"),  # type: ignore[arg-type]  # on purpose
    ),
    "a negative offset": lambda results: with_place(results, offset=-1),
    "an offset that is no integer": lambda results: with_place(results, offset=True),
    "two kinds of files": lambda results: with_place(results, transform_descriptors=["zstd"]),
    "more about a place": lambda results: vars(results[2].storage_data).update(node="a"),
    "more about an item": lambda results: vars(results[2].index).update(node="a"),
    "an offset that is a tuple": lambda results: vars(results[0].index).update(offset=(0, 0)),
}


@pytest.mark.parametrize("change", UNUSUAL_RESULTS.values(), ids=UNUSUAL_RESULTS)
def test_unusual_results_stay_as_they_are(change: Callable[[list[WriteResult]], None]) -> None:
    """Nothing of items and places is lost, and the rank does not fail."""
    (results, _) = results_of(small())
    assert isinstance(in_columns(results), ResultColumns)
    change(results)
    assert in_columns(results) == places_of(results)


def test_transforms_are_those_of_each_file() -> None:
    """Items of a file have equal transforms, but each has a list of its own, like DCP's results."""
    results = [
        WriteResult(
            index=MetadataIndex(name),
            size_in_bytes=1,
            storage_data=_torch.StorageInfo("f", 0, 1, ["a", "b"]),
        )
        for name in "xy"
    ]
    (_, one), (_, other) = sent(results).places({})
    assert one.transform_descriptors == other.transform_descriptors == ["a", "b"]
    assert one.transform_descriptors is not other.transform_descriptors


def test_an_item_that_two_ranks_wrote_has_the_last_place() -> None:
    """The last rank's place wins, like with DCP's own results, and such metadata have no index."""
    found = small()
    (results, _) = results_of(found)
    info = replace(results[0].storage_data, offset=1000)
    ranks = [results, [replace(results[0], storage_data=info)]]
    publication = publication_of(complete_metadata(found, list(map(sent, ranks))))
    assert publication.index is None
    loaded = pickle.loads(b"".join(publication.content(None)))
    assert (
        loaded.storage_data == complete_metadata(found, list(map(in_columns, ranks))).storage_data
    )
    assert loaded.storage_data[results[0].index].offset == 1000
