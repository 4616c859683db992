"""Results that ranks send as columns make the same checkpoint as DCP's own results."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch
from nostall._commit.publication import KnownResults, complete_metadata, publication_of
from nostall._commit.results import (
    ResultColumns,
    Results,
    ResultsReference,
    StorageData,
    in_columns,
)
from support.indexes import metadata, small


def results_of(found: Metadata) -> list[list[WriteResult]]:
    """The write results of two ranks, each of which wrote one file."""
    ranks: dict[str, list[WriteResult]] = {"__0_0.distcp": [], "__1_0.distcp": []}
    for index, info in found.storage_data.items():
        result = WriteResult(index=index, size_in_bytes=info.length, storage_data=info)
        ranks[info.relative_path].append(result)
    return list(ranks.values())


def sent(results: list[WriteResult]) -> Any:
    """Results after their transfer to the coordinator, as columns."""
    return pickle.loads(pickle.dumps(in_columns(results)))


def places_of(columns: Any) -> list[tuple[MetadataIndex, Any]]:
    """Items and places; hints, which indices are not compared by, are looked at elsewhere."""
    assert isinstance(columns, ResultColumns)
    return list(columns.places({}))


@given(metadata())
def test_columns_say_what_results_say(found: Metadata) -> None:
    """Items with their hints, files, offsets, lengths, in this order."""
    for results in results_of(found):
        places = places_of(sent(results))
        assert places == [(each.index, each.storage_data) for each in results]
        assert [index.index for index, _ in places] == [each.index.index for each in results]
        assert [type(index.offset) for index, _ in places] == [
            type(each.index.offset) for each in results
        ]


@given(metadata())
def test_metadata_of_columns_are_those_of_results(found: Metadata) -> None:
    """Byte for byte, with the same index, whoever makes the columns."""
    results = results_of(found)
    plain = publication_of(complete_metadata(found, results))
    compact = publication_of(complete_metadata(found, list(map(sent, results))))
    assert compact.content(None) == plain.content(None)
    assert (compact.index, compact.files) == (plain.index, plain.files)
    assert compact.is_renamable == plain.is_renamable
    assert isinstance(compact.storage_data, StorageData)
    assert [*compact.storage_data.items()] == [*plain.storage_data.items()]


@given(found=metadata(), convert=st.sampled_from([in_columns, list]))
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


def test_equal_names_are_kept_once() -> None:
    """Ranks of a sharded model have shards of the same tensors; names take most of the memory."""
    known, results = KnownResults(), [*results_of(small())[:1]] * 3
    outcomes = [
        Results(items=sent(each), files=(), token=f"{rank}") for rank, each in enumerate(results)
    ]
    one, *others = known.fill_in(outcomes)
    assert isinstance(one, ResultColumns)
    assert all(isinstance(each, ResultColumns) and each.names is one.names for each in others)


def test_objects_are_made_when_somebody_looks() -> None:
    """They stay the same; copies and pickles are dictionaries, as in DCP's metadata."""
    (results, _) = results_of(small())
    places = StorageData([sent(results)])
    assert "in_full" not in vars(places)
    assert len(places) == len(results) == 4
    assert places[results[0].index] is places[results[0].index]
    copied: object = copy(places)
    assert type(copied) is dict
    assert deepcopy(places) == pickle.loads(pickle.dumps(places)) == dict(places)


def test_a_caller_changes_only_its_own() -> None:
    """The next save needs the places again."""
    found = small()
    (results, _) = results_of(found)
    publication = publication_of(complete_metadata(found, [sent(results)]))
    mine = publication.storage_data
    mine[results[0].index] = mine.pop(results[1].index)
    del mine[results[2].index]
    assert len(mine) == 2
    assert mine[results[0].index] == results[1].storage_data
    assert publication.storage_data == {each.index: each.storage_data for each in results}
    copied: object = mine.copy()
    assert type(copied) is dict
    assert copied == mine


def with_a_subclass(results: list[WriteResult]) -> None:
    class Mine(WriteResult):
        pass

    results[1] = Mine(**vars(results[1]))


def with_another_size(results: list[WriteResult]) -> None:
    results[0] = replace(results[0], size_in_bytes=7)


def with_a_place_of_a_users(results: list[WriteResult]) -> None:
    results[0] = replace(results[0], storage_data=("file", 0, 100))


def with_more_about_a_place(results: list[WriteResult]) -> None:
    vars(results[2].storage_data)["node"] = "a"


def with_more_about_an_item(results: list[WriteResult]) -> None:
    vars(results[2].index)["node"] = "a"


def with_a_negative_offset(results: list[WriteResult]) -> None:
    info = replace(results[0].storage_data, offset=-1)
    results[0] = replace(results[0], storage_data=info)


def with_an_offset_that_is_no_integer(results: list[WriteResult]) -> None:
    info = replace(results[0].storage_data, offset=True)
    results[0] = replace(results[0], storage_data=info)


def with_two_kinds_of_files(results: list[WriteResult]) -> None:
    info = replace(results[0].storage_data, transform_descriptors=["zstd"])
    results[0] = replace(results[0], storage_data=info)


def with_a_name_that_is_no_text(results: list[WriteResult]) -> None:
    results[0] = replace(results[0], index=MetadataIndex(b"lr"))  # type: ignore[arg-type]  # on purpose


def with_an_offset_that_is_a_tuple(results: list[WriteResult]) -> None:
    vars(results[0].index)["offset"] = (0, 0)


@pytest.mark.parametrize(
    "change",
    [
        with_a_subclass,
        with_another_size,
        with_a_place_of_a_users,
        with_more_about_a_place,
        with_more_about_an_item,
        with_a_negative_offset,
        with_an_offset_that_is_no_integer,
        with_two_kinds_of_files,
        with_a_name_that_is_no_text,
        with_an_offset_that_is_a_tuple,
    ],
)
def test_unusual_results_stay_as_they_are(change: Callable[[list[WriteResult]], None]) -> None:
    """Nothing of theirs is lost, and the rank does not fail."""
    (results, _) = results_of(small())
    assert isinstance(in_columns(results), ResultColumns)
    change(results)
    assert in_columns(results) is results


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
    (_, one), (_, other) = places_of(sent(results))
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
    assert loaded.storage_data == complete_metadata(found, ranks).storage_data
    assert loaded.storage_data[results[0].index].offset == 1000
