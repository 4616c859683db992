"""Bytes that several ranks need are read once: planned without I/O, and by real ranks."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall._read.plan import FileSpan, rotated
from nostall._read.sharing import (
    Member,
    ReadShare,
    all_want_to_share,
    read_shared,
    share_reads,
)
from nostall._storage.posix import PosixStorage
from nostall.errors import (
    DamagedCheckpointError,
    NostallError,
    OptionError,
    RankFailedError,
    RankLostError,
)
from support.ranks import run_ranks

Found = list[dict[str, Any]]
MOST_RANKS = 5
ROUND = 100
CONSTANT_NBYTES = 64 << 10
"""Beside 5 %: what ranks may read more than once, such as the heads of what is not shared."""
SOON_S = 20.0


# --- planning -------------------------------------------------------------------------------------


@st.composite
def archives(draw: st.DrawFn) -> list[FileSpan]:
    """Archives of a few files, with and without gaps between them; some are larger than a round."""
    found = []
    for file in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
        at = 0
        for _ in range(draw(st.integers(1, 12))):
            at += draw(st.sampled_from([0, 0, 0, 7]))
            nbytes = draw(st.sampled_from([1, 5, 20, 90, 250]))
            found.append(FileSpan(file, at, at + nbytes))
            at += nbytes
    return found


@st.composite
def wants(draw: st.DrawFn) -> list[dict[FileSpan, int]]:
    """The bytes of each archive that each rank reads: all, a part, or none."""
    there, ranks = draw(archives()), draw(st.integers(1, MOST_RANKS))
    wanted: list[dict[FileSpan, int]] = [{} for _ in range(ranks)]
    for archive in there:
        for of_rank in wanted:
            nbytes = draw(st.sampled_from([0, archive.nbytes, archive.nbytes, archive.nbytes // 2]))
            if nbytes:
                of_rank[archive] = nbytes
    return wanted


def shared(wanted: list[dict[FileSpan, int]]) -> dict[FileSpan, list[int]]:
    """The archives of which more than all would be read, and the ranks that want them."""
    found = {}
    for archive in {each for of_rank in wanted for each in of_rank}:
        ranks = [rank for rank, of_rank in enumerate(wanted) if archive in of_rank]
        nbytes = sum(wanted[rank][archive] for rank in ranks)
        if len(ranks) > 1 and nbytes > archive.nbytes:
            found[archive] = ranks
    return found


def shares_of(wanted: list[dict[FileSpan, int]]) -> list[ReadShare]:
    planned = share_reads(wanted, round_nbytes=ROUND)
    return planned or [ReadShare(rounds=()) for _ in wanted]


def bytes_of(span: FileSpan) -> set[tuple[str, int]]:
    return {(span.file, at) for at in range(span.begin, span.end)}


@given(wanted=wants())
def test_each_rank_gets_the_bytes_that_it_shares_once(wanted: list[dict[FileSpan, int]]) -> None:
    """All of them, no others, and each archive within one round."""
    expected = shared(wanted)
    for rank, each in enumerate(shares_of(wanted)):
        spans = [
            (number, span)
            for number, content in enumerate(each.rounds)
            for part in content
            for span in part.spans
        ]
        got = [place for _, span in spans for place in bytes_of(span)]
        mine = [archive for archive, ranks in expected.items() if rank in ranks]
        assert len(got) == len(set(got))
        assert set(got) == {place for archive in mine for place in bytes_of(archive)}
        for archive in mine:
            assert any(
                span.file == archive.file
                and span.begin <= archive.begin
                and archive.end <= span.end
                for _, span in spans
            )


@given(wanted=wants())
def test_ranks_agree_on_who_reads_what(wanted: list[dict[FileSpan, int]]) -> None:
    """Each byte of a part is read by one of its ranks; the parts of two ranks are in one order."""
    shares = shares_of(wanted)
    assert len({len(each.rounds) for each in shares}) == 1
    for contents in zip(*(each.rounds for each in shares), strict=True):
        for rank, content in enumerate(contents):
            for part in content:
                assert rank in part.ranks
                read: list[tuple[str, int]] = []
                for reader in part.ranks:
                    for begin, span in part.blocks_of(reader, 10):
                        before = [place for each in part.spans for place in sorted(bytes_of(each))]
                        block = sorted(bytes_of(span))
                        assert before[begin : begin + len(block)] == block
                        assert len(block) <= 10
                        read += block
                assert sorted(read) == sorted(
                    place for span in part.spans for place in bytes_of(span)
                )
            for other in range(rank):
                between = [part for part in content if other in part.ranks]
                assert between == [part for part in contents[other] if rank in part.ranks]


@given(wanted=wants())
def test_a_round_is_bounded_on_each_rank(wanted: list[dict[FileSpan, int]]) -> None:
    """Except for a single larger archive."""
    for each in shares_of(wanted):
        for content in each.rounds:
            spans = [span for part in content for span in part.spans]
            if sum(span.nbytes for span in spans) > ROUND:
                assert len(spans) == 1
                assert any(spans[0] in of_rank for of_rank in wanted)


@given(there=archives(), ranks=st.integers(2, MOST_RANKS))
def test_ranks_that_want_the_same_read_equally_much(there: list[FileSpan], ranks: int) -> None:
    """But for a byte per round."""
    (first, *_) = planned = shares_of([{each: each.nbytes for each in there}] * ranks)
    assert all(each == first for each in planned)
    loads = dict.fromkeys(range(ranks), 0)
    for content in first.rounds:
        for part in content:
            for rank, begin, end in part.pieces():
                loads[rank] += end - begin
    assert max(loads.values()) - min(loads.values()) <= len(first.rounds)


@given(wanted=wants())
def test_plans_depend_on_nothing_else(wanted: list[dict[FileSpan, int]]) -> None:
    """The order in which a rank names archives does not matter; a share survives pickling."""
    again = [dict(reversed(of_rank.items())) for of_rank in wanted]
    planned = shares_of(wanted)
    assert shares_of(again) == planned
    assert pickle.loads(pickle.dumps(planned)) == planned


def test_archives_that_overlap_are_not_shared() -> None:
    """No writer makes them: of a byte that is in two of them, only one can be served."""
    inner, outer = FileSpan("a", 10, 20), FileSpan("a", 0, 100)
    (planned, _) = shares_of([{outer: 100, inner: 10}] * 2)
    assert [part.spans for content in planned.rounds for part in content] == [(outer,)]


def test_many_ranks_are_planned_in_one_way() -> None:
    """Each of 256 ranks gets a small plan: it names the spans, not the messages."""
    there = {FileSpan("a", at << 20, (at + 1) << 20): 1 << 20 for at in range(1024)}
    planned = share_reads([there] * 256)
    assert planned is not None
    assert len(pickle.dumps(planned[0])) < 20_000


def test_all_ranks_share_or_none() -> None:
    """Ranks that would wait for others are named."""
    both = [Member(rank=0, world_size=2), Member(rank=1, world_size=2)]
    assert all_want_to_share(both)
    assert not all_want_to_share([None, None])
    assert not all_want_to_share(both[:1])  # no_dist
    for told, text in (
        ([both[0], None], r"readers of ranks \[1\] have no process_group"),
        (both[::-1], "rank 0 of 2 is rank 1 of 2 in the process_group"),
        ([*both, both[0]], "rank 0 of 3 is rank 0 of 2"),
    ):
        with pytest.raises(OptionError, match=text):
            all_want_to_share(told)


@given(count=st.integers(0, 9), ranks=st.integers(1, 9))
def test_ranks_begin_with_different_files(count: int, ranks: int) -> None:
    """Each reads all of them; as many ranks as there are files begin with each."""
    names = [str(number) for number in range(count)]
    orders = [rotated(names, rank, ranks) for rank in range(ranks)]
    assert all(sorted(order) == names for order in orders)
    firsts = [order[0] for order in orders if order]
    assert len(set(firsts)) == min(count, ranks if count else 0)


# --- one rank, with the others made up ------------------------------------------------------------


class Peers:
    """Other ranks that have ended, or that have failed."""

    rank = 0

    def __init__(self, failed: int | None) -> None:
        self._failed = failed

    def first_failed(self, *, failed: bool) -> int | None:
        if self._failed is None:
            raise RankLostError("gone")
        return 0 if failed else self._failed

    def exchange(self, sent: Any, received: Any) -> None:
        raise AssertionError("one has failed")


def read_with(peers: Peers, path: Path) -> BaseException:
    (planned, _) = shares_of([{FileSpan("file", 0, 8): 8}] * 2)
    with pytest.raises(NostallError) as caught:
        read_shared(planned, [], PosixStorage(str(path)), peers, lambda *_: None, threads=1)
    return caught.value


def test_the_own_error_is_raised_even_if_others_are_gone(tmp_path: Path) -> None:
    """It is why they have given up, as likely as not. Nothing is exchanged after a failure."""
    error = read_with(Peers(None), tmp_path)
    assert isinstance(error, DamagedCheckpointError)
    assert isinstance(error.__cause__, RankLostError)
    (tmp_path / "file").write_bytes(bytes(8))
    assert isinstance(read_with(Peers(None), tmp_path), RankLostError)
    failed = read_with(Peers(1), tmp_path)
    assert isinstance(failed, RankFailedError)
    assert failed.rank == 1
    assert not [each for each in threading.enumerate() if each.name.startswith("nostall-read")]


# --- real ranks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The reports of the ranks, which start once for all scenarios."""
    return run_ranks(4, "sharing:everything", tmp_path_factory.mktemp("sharing"))


def assert_read_once(facts: list[dict[str, Any]], stored: int) -> None:
    assert all(each["same"] for each in facts)
    assert sum(each["read"] for each in facts) <= 1.05 * stored + CONSTANT_NBYTES


@pytest.mark.parametrize("how", ["plain", "crc", "thread", "cached", "nostall.load"])
def test_a_replicated_state_is_read_once(found: Found, how: str) -> None:
    """Bit by bit what was saved, on all ranks; each of them reads its part."""
    facts = [each["replicated"][how] for each in found]
    stored = found[0]["replicated"]["stored"]
    assert_read_once(facts, stored)
    assert all(each["read"] >= 0.5 * stored / len(found) for each in facts)


def test_without_a_group_each_rank_reads_all(found: Found) -> None:
    """Without a process group each rank reads everything, and loads the right values."""
    for each in found:
        assert each["replicated"]["alone"]["same"]
        assert each["replicated"]["alone"]["read"] >= 0.95 * each["replicated"]["stored"]


@pytest.mark.parametrize("case", ["pairs", "by_columns", "own_and_common", "every_second"])
def test_what_some_ranks_need_is_read_once(found: Found, case: str) -> None:
    """Shards on two ranks each, columns, a mixture, and what has gaps."""
    facts = [each[case] for each in found]
    assert_read_once(facts, facts[0]["stored"])


def test_rows_of_different_ranks_are_not_exchanged(found: Found) -> None:
    """They are read once anyway: each rank reads its own."""
    for each in found:
        rows, stored = each["by_columns"]["rows"], each["by_columns"]["stored"]
        assert rows["same"]
        assert rows["read"] <= stored / len(found) + (32 << 10)


def test_dtensors_are_loaded_in_other_placements(found: Found) -> None:
    """On meshes of one and two dimensions: alone, together, and into plain tensors."""
    assert [each["resharded"] for each in found] == [[]] * len(found)


@pytest.mark.parametrize("how", ["short", "none"])
def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(found: Found, how: str) -> None:
    """Soon, each with the cause; afterwards the same group loads again."""
    last = len(found) - 1
    for each in found:
        facts = each["unreadable"][how]
        failures = dict(facts["failures"])
        assert facts["took_s"] < SOON_S
        own = failures.pop(str(last))
        assert own.startswith("DamagedCheckpointError: the file ")
        assert "(items x" in own
        assert "__0_0.distcp" in own
        assert failures.keys() == {str(rank) for rank in range(last)}
        for text in failures.values():
            assert text.startswith(f"RankFailedError: rank {last} failed")
        assert each["unreadable"]["whole"]["failures"] == {}
        assert each["unreadable"]["whole"]["same"]


@pytest.mark.parametrize("when", ["first", "last", "interrupt"])
def test_a_planner_that_fails_on_one_rank_is_an_error_on_all(found: Found, when: str) -> None:
    """In a round that others go on from, and in the last one."""
    kind = "KeyboardInterrupt" if when == "interrupt" else "ZeroDivisionError"
    for each in found:
        facts = each["failing_planners"][when]
        assert facts["took_s"] < SOON_S
        for rank in range(len(found)):
            expected = kind if rank == 1 else "RankFailedError: rank 1 failed"
            assert facts["failures"][str(rank)].startswith(expected)


@pytest.mark.parametrize("what", ["large", "small"])
def test_a_flipped_bit_is_found_on_all_ranks(found: Found, what: str) -> None:
    """Each compares what it has received."""
    for each in found:
        facts = each["flipped"][what]
        assert len(facts["failures"]) == len(found)
        for text in facts["failures"].values():
            assert "CRC-32 of the values" in text
            assert f"(items {what})" in text


def test_wrong_use_is_a_typed_error_on_all_ranks(found: Found) -> None:
    """It names the ranks and what to do; nobody waits for the others."""
    for rank, each in enumerate(found):
        facts = each["wrong_use"]
        for case, text in (
            ("not on rank 0", "the readers of ranks [0] have no process_group"),
            ("only on rank 0", "have no process_group"),
            ("smaller", f"rank 0 of {len(found)} is rank 0 of 1" if rank == 0 else "of 1 in"),
        ):
            assert facts[case]["took_s"] < SOON_S
            (failure,) = facts[case]["failures"].values()
            assert failure.startswith("OptionError: ")
            assert text in failure
            assert "give the readers of all ranks the group that dcp.load has" in failure
        assert ("not in it" in facts) == (rank > 0)
        assert 'torch.distributed.new_group(backend="gloo")' in facts["no CPU"]["failures"]["here"]


def test_ranks_that_load_alone_do_not_share(found: Found) -> None:
    """``no_dist=True``: others may not load at all."""
    for each in found:
        facts = each["wrong_use"]["no_dist"]
        assert facts["failures"] == {}
        assert facts["same"]
        assert facts["read"] > 3_000_000


def test_a_rank_that_ends_is_an_error_on_the_others(tmp_path: Path) -> None:
    """In the middle of a load, within the group's timeout."""
    (found, last) = run_ranks(2, "sharing:lost", tmp_path)
    assert last is None
    assert found["failures"]
    assert found["took_s"] < 2 * SOON_S
