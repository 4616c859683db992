"""Decisions and formats that need no process and no disk, from checksums to messages."""

from __future__ import annotations

import builtins
import copy
import json
import math
import os
import pickle
import re
import socket
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from nostall import errors
from nostall._commit.collect import collect, require_all_present, require_one_result_each
from nostall._engine import Engine
from nostall._model.jobs import (
    Failure,
    FileImage,
    FileReceipt,
    RankFailed,
    RankReport,
    RankWritten,
    Seal,
    SealTable,
    WriteJob,
)
from nostall._model.lifecycle import TRANSITIONS, Lifecycle, State
from nostall._model.names import is_shard_name
from nostall._model.sealing import Sealer, seal_patches
from nostall._model.values import Abort, Commit
from nostall._plan.cache import (
    CachedPlans,
    Changed,
    Reuse,
    Together,
    choose_route,
    matches_loaded,
    plans_alone,
    same_plan,
)
from nostall._ranks.failures import error_of, failure_of
from nostall._ranks.reports import when_done
from nostall._writer import seals
from nostall._writer.crc import combine
from nostall._writer.framing import MAX_MESSAGE_NBYTES, Message, Receiver, encode, send
from nostall._writer.handle import SEALS_KEPT, SealsSent
from nostall._writer.images import Window
from nostall._writer.main import _Writer
from nostall._writer.messages import (
    UnknownSealsError,
    job_from_message,
    job_to_message,
    report_from_message,
    report_to_message,
    seals_from_message,
    seals_to_message,
)
from nostall._writer.seals import ChunkPlans, Payloads, plan_chunks
from nostall.errors import (
    IllegalTransitionError,
    IncompleteSaveError,
    NostallError,
    OptionError,
    ProtocolError,
    SaveError,
    WriteError,
)
from nostall.options import EngineOptions, WriterOptions

# --- checksums ------------------------------------------------------------------------------------


@given(pieces=st.lists(st.binary(max_size=300), max_size=8))
def test_combined_checksums_of_pieces_are_that_of_the_whole(pieces: list[bytes]) -> None:
    """However bytes are cut, ``combine`` over the pieces gives what zlib gives for all of them."""
    crc = 0
    for piece in pieces:
        crc = combine(crc, zlib.crc32(piece), len(piece))
    assert crc == zlib.crc32(b"".join(pieces))


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 65537, (8 << 20) + 3])
def test_checksums_combine_over_long_pieces(nbytes: int) -> None:
    """The length of the second piece may be anything, whole powers of two included."""
    head, tail = b"in front", bytes(nbytes)
    assert combine(zlib.crc32(head), zlib.crc32(tail), nbytes) == zlib.crc32(tail, zlib.crc32(head))


CRCS = st.integers(0, 2**32 - 1)
LENGTHS = st.integers(1, 2**44)


@given(a=CRCS, b=CRCS, c=CRCS, nbytes_b=LENGTHS, nbytes_c=LENGTHS)
def test_checksums_combine_in_any_grouping(
    a: int, b: int, c: int, nbytes_b: int, nbytes_c: int
) -> None:
    """Neighbours may be joined in any order, for lengths that no test could hold in memory."""
    left = combine(combine(a, b, nbytes_b), c, nbytes_c)
    right = combine(a, combine(b, c, nbytes_c), nbytes_b + nbytes_c)
    assert left == right


# --- sealing --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Form:
    """A container's form: where its payload lies, how long it is itself, and how it is sealed."""

    offset: int
    nbytes: int
    length: int
    seal: Seal


@st.composite
def forms(draw: st.DrawFn) -> Form:
    """Forms with their fields anywhere behind the payload."""
    offset, nbytes = draw(st.integers(0, 5)), draw(st.integers(1, 40))
    widths = [("crc", 4), ("crc in directory", 4), ("id", 40), ("id crc", 4), ("id directory", 4)]
    places, at = {}, offset + nbytes
    for name, width in draw(st.permutations(widths)):
        at += draw(st.integers(0, 3))
        places[name] = at
        at += width
    seal = Seal(
        payload_crc_at=(places["crc"], places["crc in directory"]),
        hash_before=draw(st.integers(0, 2**64 - 1)),
        crcs_after=tuple(draw(st.lists(CRCS, max_size=3))),
        id_at=places["id"],
        id_names=draw(st.text("0123456789", min_size=20, max_size=20)).encode(),
        id_crc_at=(places["id crc"], places["id directory"]),
    )
    return Form(offset=offset, nbytes=nbytes, length=at, seal=seal)


def sealed(image: bytes, blob: int, form: Form) -> tuple[int, bytes]:
    """The payload's CRC, and the image with one container sealed by what the patches say."""
    begin = blob + form.offset
    crc32 = zlib.crc32(image[begin : begin + form.nbytes])
    content = bytearray(image)
    for at, field in seal_patches(form.seal, crc32):
        content[blob + at : blob + at + len(field)] = field
    return crc32, bytes(content)


@given(data=st.data(), form=forms(), count=st.integers(0, 3))
def test_a_sealer_writes_what_the_patches_say(data: st.DataObject, form: Form, count: int) -> None:
    """For any seal and any payload, byte by byte, and nothing else; the payload's CRC is kept."""
    total = count * form.length
    image = expected = data.draw(st.binary(min_size=total, max_size=total))
    crcs = []
    for blob in range(0, total, form.length):
        crc32, expected = sealed(expected, blob, form)
        crcs.append(crc32)
    memory = bytearray(image)
    found = [7] * (count + 1)
    Sealer(form.offset, form.nbytes, form.seal).seal(
        memoryview(memory),
        slots=range(1, count + 1),
        payloads_at=range(form.offset, form.offset + total, form.length),
        crc32_of_slot=found,
    )
    assert bytes(memory) == expected
    assert found == [7, *crcs]


@given(
    data=st.data(),
    kinds=st.lists(forms(), min_size=1, max_size=3),
    left_open=st.sets(st.integers(0, 2), max_size=1),
)
def test_an_image_is_sealed_the_same_wherever_it_is_cut(
    data: st.DataObject, kinds: list[Form], left_open: set[int]
) -> None:
    """Payloads in one chunk or many, summed in any order: the seals are the whole payloads'."""
    template_of_slot = data.draw(st.lists(st.integers(0, len(kinds) - 1), max_size=6))
    offsets = [0, *accumulate(kinds[kind].length for kind in template_of_slot)]
    end = offsets.pop()
    image = expected = data.draw(st.binary(min_size=end, max_size=end))
    crcs = [0] * len(offsets)
    for slot, (blob, kind) in enumerate(zip(offsets, template_of_slot, strict=True)):
        if kind not in left_open:
            crcs[slot], expected = sealed(expected, blob, kinds[kind])
    table = SealTable(
        templates=tuple(
            (form.offset, form.nbytes, None if kind in left_open else form.seal)
            for kind, form in enumerate(kinds)
        ),
        blob_offsets=tuple(offsets),
        template_of_slot=tuple(template_of_slot),
    )
    size = data.draw(st.integers(1, 200))
    bounds = [*range(0, end, size), end] if end else [0, 0]
    with patch.object(seals, "_WORTH_JOINING_NBYTES", data.draw(st.integers(1, 90))):
        payloads = Payloads(plan_chunks(table, bounds))
    memory = bytearray(image)
    window = Window(memoryview(memory), 0)
    chunks = range(len(bounds) - 1)
    for chunk in data.draw(st.permutations(chunks)):
        payloads.sum_parts(window, chunk)
    for chunk in data.draw(st.permutations(chunks)):
        payloads.seal_ending_in(window, chunk)
    assert bytes(memory) == expected
    assert list(payloads.crc32) == crcs
    for chunk in data.draw(st.permutations(chunks)):
        payloads.sum_chunk(window, chunk)
    assert payloads.crc32_of_file == zlib.crc32(expected)


def test_a_cut_is_remembered_for_its_table_and_its_bounds() -> None:
    """The same table cut at the same bounds gives the same object; others give a new one."""
    plans = ChunkPlans()
    one, other = (
        SealTable(templates=((0, 9, None),), blob_offsets=(0,), template_of_slot=(0,))
        for _ in range(2)
    )

    def of(table: SealTable, bounds: Sequence[int]) -> Any:
        found = plans.plan(table, bounds)
        assert found == plan_chunks(table, bounds)
        return found

    first = of(one, [0, 9])
    assert of(one, (0, 9)) is first
    assert of(other, [0, 9]) is not first
    assert of(one, [0, 4, 9]) != first


# --- lifecycle ------------------------------------------------------------------------------------

PROGRESS = [
    State.QUEUED,
    State.STAGING,
    State.STAGED,
    State.WRITING,
    State.WRITTEN,
    State.FINALIZED,
]


def in_state(state: State) -> Lifecycle:
    """A request that got to a state by legal steps."""
    request = Lifecycle()
    for step in PROGRESS[1 : PROGRESS.index(state) + 1] if state in PROGRESS else [state]:
        request.to(step)
    assert request.state is state
    return request


def test_a_request_moves_exactly_as_the_table_says() -> None:
    """Of all pairs of states, those in the table are possible; others raise, changing nothing."""
    for present in State:
        for wanted in State:
            request = in_state(present)
            if wanted in TRANSITIONS[present]:
                request.to(wanted)
                assert request.state is wanted
            else:
                with pytest.raises(
                    IllegalTransitionError, match=f"{present.value}.*{wanted.value}"
                ):
                    request.to(wanted)
                assert request.state is present


def test_the_table_is_one_way_forward_and_two_ways_out() -> None:
    """Each unfinished state leads to the next one, failed and aborted; three states are ends."""
    for present, following in pairwise(PROGRESS):
        assert TRANSITIONS[present] == {following, State.FAILED, State.ABORTED}
    for last in (State.FINALIZED, State.FAILED, State.ABORTED):
        assert TRANSITIONS[last] == frozenset()
        assert in_state(last).over
    assert TRANSITIONS.keys() == set(State)


# --- collecting -----------------------------------------------------------------------------------

OUTCOMES = st.one_of(
    st.lists(st.integers(), max_size=3), st.text(max_size=9).map(lambda text: (OSError(text), None))
)


@given(outcomes=st.lists(OUTCOMES, min_size=1, max_size=8))
def test_a_save_is_committed_only_if_every_rank_wrote_everything(outcomes: list[Any]) -> None:
    """One failed rank aborts the save, and every failed rank is named; else all results count."""
    failed = {rank: one for rank, one in enumerate(outcomes) if isinstance(one, tuple)}
    verdict = collect(outcomes)
    if failed:
        assert verdict == Abort(failures=failed)
    else:
        assert verdict == Commit(results=outcomes)


NAMES = st.lists(st.sampled_from("abcdef"), max_size=8)


@given(planned=NAMES, results=NAMES)
def test_results_that_are_not_the_planned_ones_are_refused(
    planned: list[str], results: list[str]
) -> None:
    """An item without a result, with two, or never planned is an error, whatever the order."""
    if sorted(planned) == sorted(results):
        require_one_result_each(planned, results, rank=3)
        return
    with pytest.raises(IncompleteSaveError) as caught:
        require_one_result_each(planned, results, rank=3)
    assert (caught.value.rank, caught.value.phase) == (3, "collect")


def test_the_error_names_items_that_do_not_match() -> None:
    """Which items are missing or too many stands in the message."""
    with pytest.raises(
        IncompleteSaveError, match=r"1 planned items .* 1 results .*'lost', 'twice'"
    ):
        require_one_result_each(["a", "lost", "twice"], ["twice", "a", "twice"])


@given(planned=NAMES, results=NAMES)
def test_an_item_that_no_rank_wrote_is_refused(planned: list[str], results: list[str]) -> None:
    """A rank must have written all that the metadata names; nothing else would be found."""
    if set(planned) == set(results):
        require_all_present(planned, results)
        return
    with pytest.raises(IncompleteSaveError) as caught:
        require_all_present(planned, results)
    named = sorted(set(planned) - set(results) or set(results) - set(planned))
    assert str(named[:3]) in str(caught.value)
    assert caught.value.hint


# --- plan routes ----------------------------------------------------------------------------------


def item(name: str, size: int = 1) -> WriteItem:
    extent = torch.Size([size])
    return WriteItem(
        index=MetadataIndex(name, torch.Size([0])),
        type=WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size([0]), sizes=extent),
            properties=TensorProperties(dtype=torch.float32),
            size=extent,
        ),
    )


ITEMS = st.builds(item, st.sampled_from("abcde"), st.integers(1, 2))
PLANS = st.lists(ITEMS, max_size=5, unique_by=lambda one: one.index.fqn).map(SavePlan)


@st.composite
def caches(draw: st.DrawFn) -> CachedPlans:
    local = draw(PLANS)
    kept = draw(st.lists(st.booleans(), min_size=len(local.items), max_size=len(local.items)))
    mine = [one for one, keep in zip(local.items, kept, strict=True) if keep]
    return CachedPlans(
        group=draw(st.sampled_from(["g", "h"])),
        planner=draw(st.sampled_from(["p", "q"])),
        local=local,
        final=replace(local, items=mine, storage_data="prefix"),
        validated=draw(st.booleans()),
    )


@given(cached=st.none() | caches(), local=PLANS, planner=st.sampled_from(["p", "q"]))
def test_whether_ranks_talk_does_not_depend_on_one_ranks_plan(
    cached: CachedPlans | None, local: SavePlan, planner: str
) -> None:
    """All ranks plan together if what they agreed on is not valid for this group; else none."""
    route = choose_route(cached, group="g", planner=planner, local=local)
    silent = cached is not None and cached.validated and cached.group == "g"
    assert plans_alone(cached, group="g") == silent
    assert isinstance(route, Together) == (not silent)


@given(cached=caches(), local=PLANS, planner=st.sampled_from(["p", "q"]))
def test_a_final_plan_is_used_again_only_for_the_same_plan(
    cached: CachedPlans, local: SavePlan, planner: str
) -> None:
    """With one item more, fewer or different, or another planner, the old plan does not fit."""
    cached = replace(cached, group="g", validated=True)
    route = choose_route(cached, group="g", planner=planner, local=local)
    same = cached.planner == planner and cached.local.items == local.items
    assert isinstance(route, Reuse) == same
    if isinstance(route, Reuse):
        assert route.final is cached.final


@given(cached=caches())
def test_an_unchanged_plan_is_always_recognised(cached: CachedPlans) -> None:
    """Also where it is an equal one, not the same object, and where storage has marked it."""
    cached = replace(cached, group="g", validated=True)
    local = pickle.loads(pickle.dumps(replace(cached.local, storage_data="anything")))
    route = choose_route(cached, group="g", planner=cached.planner, local=local)
    assert route == Reuse(cached.final)


@given(cached=caches(), local=PLANS)
def test_a_rank_that_changed_writes_all_that_only_it_knows(
    cached: CachedPlans, local: SavePlan
) -> None:
    """Alone, it writes its assigned items and what is new, not what another rank writes already."""
    cached = replace(cached, group="g", planner="p", validated=True)
    assume(not same_plan(cached.local, local))
    route = choose_route(cached, group="g", planner="p", local=local)
    assert isinstance(route, Changed)
    assert route.local is local
    assert route.final.storage_data == cached.final.storage_data
    told = {one.index for one in cached.final.items}
    for one in local.items:
        left_to_others = one in cached.local.items and one.index not in told
        assert (one in route.final.items) == (not left_to_others)
    assert [one for one in local.items if one in route.final.items] == route.final.items


@given(loaded=st.none() | st.lists(PLANS, min_size=1, max_size=4), local=PLANS, data=st.data())
def test_loaded_plans_count_only_if_this_ranks_is_among_them(
    loaded: list[SavePlan] | None, local: SavePlan, data: st.DataObject
) -> None:
    """A checkpoint of another number of ranks, or of another plan, does not stand for this one."""
    world_size = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, world_size - 1))
    if loaded is not None and rank < len(loaded) and data.draw(st.booleans()):
        local = replace(loaded[rank], storage_data="ours")
    expected = (
        loaded is not None
        and len(loaded) == world_size
        and loaded[rank].items == local.items
        and loaded[rank].planner_data == local.planner_data
    )
    assert matches_loaded(loaded, rank=rank, world_size=world_size, local=local) == expected


# --- errors ---------------------------------------------------------------------------------------

ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
]
PLACE = {"rank": 3, "phase": "write", "path": "/ckpt/__3_0.distcp", "job": "ab12", "hint": "do it"}
OWN = {"errno": 28, "exit_code": -9, "nbytes": 1 << 40}
"""Attributes that only some errors have."""


def example(kind: type[BaseException]) -> BaseException:
    own = {name: value for name, value in OWN.items() if name in vars(kind("x"))}
    if issubclass(kind, WriteError | errors.NotDurableError):
        own["errno"] = OWN["errno"]
    return kind("what went wrong", **PLACE, **own)


def attributes_of(error: BaseException) -> dict[str, Any]:
    names = ("message", "args", *PLACE, *OWN, "note")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy"])
def test_every_error_survives_the_way_to_another_process(how: str) -> None:
    """Type, attributes, notes and text are the same after pickling and after copying."""
    assert len(ERRORS) > 10
    for kind in ERRORS:
        error = example(kind)
        error.note = "kept by whoever caught it"  # type: ignore[attr-defined]  # on purpose
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note("and a note")
        arrived: BaseException = {
            "pickle": lambda e=error: pickle.loads(pickle.dumps(e)),
            "copy": lambda e=error: copy.copy(e),
            "deepcopy": lambda e=error: copy.deepcopy(e),
        }[how]()
        assert type(arrived) is kind
        assert str(arrived) == str(error)
        assert attributes_of(arrived) == attributes_of(error)
        assert getattr(arrived, "__notes__", None) == getattr(error, "__notes__", None)


def test_every_error_says_what_where_and_what_to_do() -> None:
    """The text has the message, every known place and the hint, whatever the class inherits."""
    for kind in ERRORS:
        assert str(example(kind)) == (
            "what went wrong [rank=3 phase=write path=/ckpt/__3_0.distcp job=ab12] (do it)"
        )
        assert str(kind("alone")) == "alone"


def test_the_documented_tree_is_the_real_one() -> None:
    """The docstring names exactly these classes, each below its bases, built-in ones included."""
    assert errors.__doc__ is not None
    path: list[tuple[int, type]] = []
    named = set()
    for line in errors.__doc__.splitlines():
        found = re.search(r"[A-Z]\w+Error\b", line)
        if found is None or not re.match(r"[\s│├└─]*[A-Z]\w+Error\b", line):
            continue
        kind = getattr(errors, found.group())
        named.add(kind)
        while path and path[-1][0] >= found.start():
            path.pop()
        assert kind.__bases__[0] is (path[-1][1] if path else Exception)
        also = re.findall(r"\(also (\w+)\)", line)
        assert list(kind.__bases__[1:]) == [getattr(builtins, name) for name in also]
        path.append((found.start(), kind))
    assert named == set(ERRORS)


def test_errors_are_caught_as_the_built_in_ones_they_also_are() -> None:
    """Code that knows nothing of nostall catches a full disk as ``OSError`` with its errno."""
    with pytest.raises(OSError) as caught:
        raise WriteError("full", errno=28, path="/x")
    assert caught.value.errno == 28
    assert issubclass(OptionError, ValueError)
    assert issubclass(errors.SaveTimeoutError, TimeoutError)
    assert issubclass(errors.ReservationError, MemoryError)
    assert issubclass(errors.NotDurableError, OSError)
    assert issubclass(WriteError, SaveError)
    assert issubclass(SaveError, NostallError)


def test_what_may_have_been_published_is_not_caught_as_a_save_that_failed() -> None:
    """A directory whose save has failed may hold a checkpoint, and must not be removed then.

    The error keeps its kind and its errno on the way to other ranks.
    """
    error = errors.NotDurableError("not durable", errno=5, path="/x")
    assert isinstance(error, NostallError)
    assert not isinstance(error, SaveError)
    arrived = error_of(RankFailed(rank=1, failure=failure_of(error, phase="commit")))
    assert (type(arrived), arrived.path) == (errors.NotDurableError, "/x")
    assert isinstance(arrived, OSError)
    assert arrived.errno == 5


# --- reports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes", ["before", "later"])
def test_a_report_that_cannot_be_finished_is_a_failed_one(comes: str) -> None:
    """A waiter for a rank's report gets the exception from making it, not a deadline."""

    def finish(_: list[RankReport]) -> RankReport:
        raise MemoryError("no luck")

    part: Future[RankReport] = Future()
    if comes == "before":
        part.set_result(RankWritten(rank=3, receipts=()))
    whole = when_done([part], finish)
    if comes == "later":
        part.set_result(RankWritten(rank=3, receipts=()))
    report = whole.result(timeout=0)
    assert isinstance(report, RankFailed)
    assert (report.rank, report.failure.message) == (3, "MemoryError: no luck")


# --- options --------------------------------------------------------------------------------------

ENGINE_MISTAKES: list[tuple[str, Any, str]] = [
    ("io_threads", 0, "at least 1"),
    ("chunk_nbytes", 0, "multiple of 4096"),
    ("chunk_nbytes", 4095, "multiple of 4096"),
    ("chunk_nbytes", 6000, "multiple of 4096"),
    ("chunk_nbytes", -4096, "multiple of 4096"),
    ("max_in_flight", 0, "at least 1"),
    ("cpu_priority", -1, "0 to 19"),
    ("cpu_priority", 20, "0 to 19"),
    ("io_priority", 4, "0, 1, 2 or 3"),
    ("io_priority", -1, "0, 1, 2 or 3"),
    ("save_timeout_s", 0.0, "positive"),
    ("save_timeout_s", -1.0, "positive"),
    ("save_timeout_s", math.nan, "positive"),
    ("save_timeout_s", math.inf, "positive"),
]
GOOD_WRITER: dict[str, Any] = {
    "thread_count": 2,
    "file_per_item": False,
    "sync_files": True,
    "overwrite": True,
    "separation_hint": None,
    "processes": 1,
}
WRITER_MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"thread_count": 0}, "thread_count=0", "at least 1"),
    (
        {"separation_hint": "opt", "thread_count": 1},
        "separation_hint='opt' with thread_count=1",
        "thread_count >= 2",
    ),
    ({"separation_hint": ""}, "separation_hint=''", "prefix"),
    ({"separation_hint": "a/b"}, "separation_hint='a/b'", "prefix"),
    ({"separation_hint": "../up"}, "separation_hint='../up'", "prefix"),
    ({"separation_hint": ".metadata"}, "separation_hint='.metadata'", "prefix"),
]


def test_a_wrong_engine_option_is_named_with_its_value_and_the_fix() -> None:
    """The error stands where the option was passed and says what to pass instead."""
    for name, value, fix in ENGINE_MISTAKES:
        with pytest.raises(OptionError) as caught:
            EngineOptions(**{name: value})
        assert f"{name}={value}" in caught.value.message
        assert caught.value.hint is not None
        assert fix in caught.value.hint


def test_a_wrong_writer_option_is_named_with_its_value_and_the_fix() -> None:
    """Combinations that exclude each other are an error when the writer is made."""
    WriterOptions(**GOOD_WRITER)
    WriterOptions(**{**GOOD_WRITER, "separation_hint": "optimizer"})
    for change, given_value, fix in WRITER_MISTAKES:
        with pytest.raises(OptionError) as caught:
            WriterOptions(**{**GOOD_WRITER, **change})
        assert given_value in caught.value.message
        assert caught.value.hint is not None
        assert fix in caught.value.hint


def test_the_limits_of_options_are_possible() -> None:
    """The largest and smallest values that the hints speak of are accepted."""
    EngineOptions(io_threads=1, chunk_nbytes=4096, max_in_flight=1, cpu_priority=0, io_priority=0)
    EngineOptions(cpu_priority=19, io_priority=3, save_timeout_s=1e-3)
    EngineOptions(cpu_priority=None, io_priority=None, save_timeout_s=1e9)


# --- messages -------------------------------------------------------------------------------------

TEXT = st.text(max_size=20)
NUMBERS = st.integers(0, 2**40)
FAILURES = st.builds(
    Failure,
    kind=TEXT,
    message=TEXT,
    phase=TEXT,
    path=st.none() | TEXT,
    errno=st.none() | st.integers(1, 200),
    exit_code=st.none() | st.integers(-64, 255),
    hint=st.none() | TEXT,
    traceback=TEXT,
)
RECEIPTS = st.builds(
    FileReceipt,
    name=TEXT.filter(is_shard_name),
    nbytes=NUMBERS,
    packed_crc32=st.lists(CRCS, max_size=4).map(lambda crcs: array("I", crcs).tobytes()),
    crc32_of_file=st.none() | CRCS,
    extents=st.none() | st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4).map(tuple),
    started_s=st.floats(allow_nan=False),
    finished_s=st.floats(allow_nan=False),
    fsynced=st.booleans(),
)
REPORTS = st.one_of(
    st.builds(RankFailed, rank=st.integers(0, 5000), failure=FAILURES),
    st.builds(
        RankWritten, rank=st.integers(0, 5000), receipts=st.lists(RECEIPTS, max_size=4).map(tuple)
    ),
)
SEALS = st.builds(
    Seal,
    payload_crc_at=st.tuples(NUMBERS, NUMBERS),
    hash_before=st.integers(0, 2**64 - 1),
    crcs_after=st.lists(CRCS, max_size=3).map(tuple),
    id_at=NUMBERS,
    id_names=st.text("0123456789", min_size=20, max_size=20).map(str.encode),
    id_crc_at=st.tuples(NUMBERS, NUMBERS),
)
SEAL_TABLES = st.builds(
    SealTable,
    templates=st.lists(st.tuples(NUMBERS, NUMBERS, st.none() | SEALS), max_size=3).map(tuple),
    blob_offsets=st.lists(NUMBERS, max_size=4).map(tuple),
    template_of_slot=st.lists(st.integers(0, 3), max_size=4).map(tuple),
)
PATHS = st.text(max_size=20) | st.binary(max_size=8).map(os.fsdecode)
JOBS = st.builds(
    WriteJob,
    job=TEXT,
    rank=st.integers(0, 5000),
    directory=PATHS,
    files=st.lists(
        st.builds(
            FileImage,
            name=PATHS,
            nbytes=NUMBERS,
            block=NUMBERS,
            block_offset=NUMBERS,
            seals=SEAL_TABLES,
        ),
        max_size=3,
    ).map(tuple),
    sync_files=st.booleans(),
    io_threads=st.integers(1, 64),
    chunk_nbytes=NUMBERS,
    direct=st.booleans(),
    stream=st.none() | st.binary(max_size=50),
    sys_path=st.lists(PATHS, max_size=3).map(tuple),
    faults=st.lists(st.dictionaries(TEXT, NUMBERS | TEXT, max_size=2), max_size=2).map(tuple),
)


def over_the_wire(message: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode(message)[12:])
    return body


@settings(max_examples=60)
@given(job=JOBS)
def test_a_job_arrives_as_it_was_sent(job: WriteJob) -> None:
    """Every field, names that are no UTF-8 and user callables' bytes, too; seal tables first."""
    tables = tuple(image.seals for image in job.files)
    number, arrived = seals_from_message(over_the_wire(seals_to_message(7, tables)))
    assert (number, arrived) == (7, tables)
    assert job_from_message(over_the_wire(job_to_message(job, 7)), {7: arrived}) == job


@given(report=REPORTS)
def test_a_report_arrives_as_it_was_sent(report: RankReport) -> None:
    """Receipts and failures, with each optional field present or not."""
    message = over_the_wire(report_to_message("j/0/1", report))
    assert message["job"] == "j/0/1"
    assert report_from_message(message) == report


TABLE_LISTS = st.lists(SEAL_TABLES, min_size=1, max_size=3).map(tuple)


@given(data=st.data(), lists=st.lists(TABLE_LISTS, min_size=1, max_size=SEALS_KEPT + 3))
def test_a_writer_always_has_the_tables_that_a_job_refers_to(
    data: st.DataObject, lists: list[tuple[SealTable, ...]]
) -> None:
    """Whatever the order of jobs; tables are sent once while they are in use, and few are kept."""
    sent = SealsSent()
    held: dict[int, tuple[SealTable, ...]] = {}
    recent: list[int] = []
    for which in data.draw(st.lists(st.sampled_from(range(len(lists))), max_size=60)):
        number, messages = sent.refer(lists[which])
        for message in messages:
            if message["type"] == "forget_seals":
                del held[message["number"]]
            else:
                held.update([seals_from_message(over_the_wire(message))])
        assert held[number] == lists[which]
        assert len(held) <= SEALS_KEPT
        assert (not messages) == (which in recent)
        recent = [*(one for one in recent if one != which), which][-SEALS_KEPT:]


def test_equal_tables_are_distinguished_by_identity() -> None:
    """A table is kept alive while it is known, so that no other one can get its address."""
    sent = SealsSent()
    numbers = set()
    for _ in range(SEALS_KEPT):
        table = SealTable(templates=((0, 9, None),), blob_offsets=(0,), template_of_slot=(0,))
        number, messages = sent.refer((table,))
        assert [message["type"] for message in messages] == ["seals"]
        numbers.add(number)
    assert len(numbers) == SEALS_KEPT


def test_a_job_with_unknown_tables_is_answered_as_failed(
    wire: tuple[socket.socket, socket.socket],
) -> None:
    """The writer process says so and goes on; it neither ends nor writes anything."""
    ours, theirs = wire
    writer = _Writer(ours)
    (job, *_) = example_messages()
    seals: Message = {"type": "seals", "number": 3, "tables": []}
    for told in ([], [seals, {"type": "forget_seals", "number": 3}]):
        for message in (*told, job):
            writer.take(copy.deepcopy(message), [])
        received = Receiver(theirs).receive()
        assert received is not None
        report = report_from_message(received[0])
        assert received[0]["job"] == "j"
        assert isinstance(report, RankFailed)
        assert (report.failure.kind, report.failure.path) == ("ProtocolError", "/d")
        assert "3" in report.failure.message


def test_a_job_with_another_number_of_tables_is_a_protocol_error() -> None:
    """A file without a table, or the other way round, is not guessed at."""
    (job, *_) = example_messages()
    with pytest.raises(ProtocolError):
        job_from_message(job, {3: ()})


def example_table() -> SealTable:
    seal = Seal(
        payload_crc_at=(1, 2),
        hash_before=3,
        crcs_after=(4,),
        id_at=5,
        id_names=b"0" * 20,
        id_crc_at=(6, 7),
    )
    return SealTable(templates=((0, 9, seal),), blob_offsets=(0,), template_of_slot=(0,))


def read(message: dict[str, Any]) -> object:
    """What the message says, by the function that its receiver uses."""
    match message["type"]:
        case "write":
            return job_from_message(message, {3: (example_table(),)})
        case "seals":
            return seals_from_message(message)
        case _:
            return report_from_message(message)


def example_messages() -> list[dict[str, Any]]:
    image = FileImage(name="f", nbytes=1, block=1, block_offset=0, seals=example_table())
    job = WriteJob(
        job="j",
        rank=0,
        directory="/d",
        files=(image,),
        sync_files=True,
        io_threads=1,
        chunk_nbytes=4096,
        direct=True,
        stream=b"pickle",
        sys_path=("p",),
    )
    receipt = FileReceipt(
        name="f",
        planned_name="f",
        nbytes=1,
        packed_crc32=bytes(4),
        crc32_of_file=7,
        extents=((0, 1),),
        started_s=0.0,
        finished_s=1.0,
        fsynced=True,
    )
    failure = Failure(kind="WriteError", message="m", phase="write")
    return [
        over_the_wire(job_to_message(job, 3)),
        over_the_wire(report_to_message("j", RankWritten(rank=0, receipts=(receipt,)))),
        over_the_wire(report_to_message("j", RankFailed(rank=0, failure=failure))),
        over_the_wire(seals_to_message(3, (example_table(),))),
    ]


def damaged(message: Any) -> Iterator[Any]:
    """The message with one part of it missing or replaced, for every part."""
    parts: list[Any] = []
    if isinstance(message, dict):
        parts = list(message)
    elif isinstance(message, list):
        parts = list(range(len(message)))
    for part in parts:
        without = copy.copy(message)
        del without[part]
        yield without
        others: list[Any] = [None, 17, "text", [], {}, [1], ["x"], [[1]]]
        for other in [*others, *damaged(message[part])]:
            changed = copy.copy(message)
            changed[part] = other
            yield changed


def test_a_damaged_message_is_a_protocol_error() -> None:
    """Whatever part is missing or of another kind: it is read, or refused as one typed error."""
    for message in example_messages():
        read(copy.deepcopy(message))
        for changed in damaged({key: message[key] for key in message if key != "type"}):
            with suppress(ProtocolError, UnknownSealsError):
                read({**copy.deepcopy(changed), "type": message["type"]})


def test_a_message_without_a_field_is_a_protocol_error() -> None:
    """No field of a job, of seal tables or of a receipt has a silent default."""
    job, written, _, seals = example_messages()
    for message in (job, seals):
        for name in set(message) - {"type", "descriptors"}:
            with pytest.raises(ProtocolError):
                read({key: value for key, value in message.items() if key != name})
    for name in written["report"]["receipts"][0]:
        damaged_report = copy.deepcopy(written)
        del damaged_report["report"]["receipts"][0][name]
        with pytest.raises(ProtocolError):
            report_from_message(damaged_report)


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(30)
    with ours, theirs:
        yield ours, theirs


def header(magic: bytes, nbytes: int) -> bytes:
    return struct.pack("<4sQ", magic, nbytes)


MAGIC = encode({})[:4]
GARBAGE = {
    "foreign magic": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(64),
    "a longer message than any": header(MAGIC, MAX_MESSAGE_NBYTES + 1),
    "an absurd length": header(MAGIC, 2**64 - 1),
    "not JSON": header(MAGIC, 5) + b"hello",
    "not text": header(MAGIC, 4) + b"\xff\xfe\xfd\x80",
    "no object": header(MAGIC, 7) + b"[1,2,3]",
    "a number": header(MAGIC, 1) + b"7",
    "nothing": header(MAGIC, 0),
    "no type": header(MAGIC, 11) + b'{"job":"x"}',
    "a type that is no text": header(MAGIC, 10) + b'{"type":1}',
    "nested too deep": header(MAGIC, 100_000) + b"[" * 100_000,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_what_is_no_message_is_a_protocol_error(
    kind: str, wire: tuple[socket.socket, socket.socket]
) -> None:
    """Refused as soon as it is known, without waiting for the length it claims."""
    ours, theirs = wire
    ours.sendall(GARBAGE[kind])
    with pytest.raises(ProtocolError):
        Receiver(theirs).receive()


@given(garbage=st.binary(min_size=12, max_size=100))
def test_random_bytes_are_never_taken_for_a_message(garbage: bytes) -> None:
    """Bytes that do not begin like a message are refused whatever they are."""
    assume(not garbage.startswith(MAGIC))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(30)
        ours.sendall(garbage)
        with pytest.raises(ProtocolError):
            Receiver(theirs).receive()


def test_a_message_in_pieces_is_put_together(wire: tuple[socket.socket, socket.socket]) -> None:
    """A timeout in the middle of a message loses nothing of it, wherever it is cut."""
    ours, theirs = wire
    theirs.settimeout(0.001)
    receiver = Receiver(theirs)
    raw = encode({"type": "ready", "pid": 7})
    for sent in range(1, len(raw)):
        ours.sendall(raw[:sent])
        assert not receiver.buffered()
        with pytest.raises(TimeoutError):
            receiver.receive()
        ours.sendall(raw[sent:])
        assert receiver.receive() == ({"type": "ready", "pid": 7}, [])


def test_a_receiver_that_does_not_wait_says_so(wire: tuple[socket.socket, socket.socket]) -> None:
    """Half a message is as good as none; the rest completes it."""
    ours, theirs = wire
    theirs.settimeout(None)
    receiver = Receiver(theirs, wait=False)
    raw = encode({"type": "t"})
    for piece in (b"", raw[:5], raw[5:-1]):
        ours.sendall(piece)
        with pytest.raises(BlockingIOError):
            receiver.receive()
    ours.sendall(raw[-1:])
    assert receiver.receive() == ({"type": "t"}, [])


def test_messages_sent_together_are_taken_one_by_one(
    wire: tuple[socket.socket, socket.socket],
) -> None:
    """Also where several arrive at once; the receiver then knows that one is here already."""
    ours, theirs = wire
    receiver = Receiver(theirs)
    ours.sendall(b"".join(encode({"type": "t", "n": n}) for n in range(3)))
    for n in range(3):
        received = receiver.receive()
        assert received is not None
        assert received[0]["n"] == n
        assert receiver.buffered() == (n < 2)


@pytest.mark.parametrize("rest", [b"", encode({"type": "t"})[:-3]], ids=["between", "within"])
def test_the_end_of_the_stream_is_no_message(
    rest: bytes, wire: tuple[socket.socket, socket.socket]
) -> None:
    """A peer that is gone, even in the middle of a message, is ``None``, not an error."""
    ours, theirs = wire
    ours.sendall(rest)
    ours.close()
    assert Receiver(theirs).receive() is None


def test_descriptors_arrive_with_their_message(wire: tuple[socket.socket, socket.socket]) -> None:
    """Of several messages in a row, each comes with its own descriptors, in order."""
    ours, theirs = wire
    counts = [1, 0, 1, 1, 0, 0, 1]
    sent: list[int] = []
    for number, count in enumerate(counts):
        descriptors = tuple(os.memfd_create(f"test-{number}-{n}") for n in range(count))
        for n, fd in enumerate(descriptors):
            os.write(fd, f"{number}.{n}".encode())
        send(ours, {"type": "map", "number": number}, descriptors)
        sent += descriptors
    receiver = Receiver(theirs)
    for number, count in enumerate(counts):
        received = receiver.receive()
        assert received is not None
        message, descriptors_here = received
        assert message == {"type": "map", "number": number}
        contents = [os.pread(fd, 10, 0).decode() for fd in descriptors_here]
        assert contents == [f"{number}.{n}" for n in range(count)]
        sent += descriptors_here
    for fd in sent:
        os.close(fd)


def test_sending_to_a_peer_that_is_gone_is_an_error(
    wire: tuple[socket.socket, socket.socket],
) -> None:
    """It does not end in silence: a waiter learns that there will be no answer."""
    ours, theirs = wire
    theirs.close()
    with pytest.raises(OSError):
        send(ours, {"type": "write"})


@pytest.mark.parametrize(("ranks", "threads"), [(1, 12), (2, 12), (4, 8), (8, 4), (64, 1)])
def test_ranks_on_one_host_share_the_writing_threads(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int
) -> None:
    """As many as one rank alone has, up to 32 on the host; the user's own number stands."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert Engine(EngineOptions()).io_threads == threads
    assert Engine(EngineOptions(io_threads=5)).io_threads == 5
