"""The benchmarks: contenders run, wrong checkpoints are told, limits belong to the same rounds."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.contenders import Contender, DcpAsyncSave, DcpSave, Pending
from benchmarks.group import Group
from benchmarks.loads import LoadContender, Loads, load_contenders, measure_loads
from benchmarks.report import Column, Report, Row, rendered
from benchmarks.saves import COLUMNS, LEGEND, Saves, measure_saves
from benchmarks.workloads import State, make_workload
from support import loaded
from support.ranks import run_ranks

Found = dict[str, dict[str, Any]]
RANKS = 8
SMALL = ("--mib", "1", "--rounds", "1", "--json", "found.json")


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stored() -> tuple[dict[str, Any], Found]:
    """The JSON file, and its contenders by name."""
    found = json.loads(Path("found.json").read_text())
    return found, {row["name"]: row for row in found["contenders"]}


def saved(*contenders: Contender) -> Report:
    saves = Saves(make_workload("large", 1 << 16), Path.cwd(), Group())
    return measure_saves(saves, contenders, rounds=3, limits=dict)


def measured(*command: str) -> Found:
    """Contenders that a command measures and verifies, in one round, and the limits as often."""
    assert main([*command, *SMALL]) == 0
    found, contenders = stored()
    assert {len(each) for each in found["limits"]["samples"].values()} <= {1}
    for row in contenders.values():
        assert row["status"] in ("in", "not available"), row["why"]
    return contenders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "names", "count"), [("large", "*", 11), ("many", "*planned once,dcp.save", 3)]
)
def test_every_contender_saves_what_it_is_given(shape: str, names: str, count: int) -> None:
    """Each that can take part is measured and verified, and nothing is left."""
    options = ("--shape", shape, "--contenders", names, "--memory-saves", "0")
    contenders = measured("saves", *options)
    assert len(contenders) == count
    for name, row in contenders.items():
        assert row["status"] == ("not available" if name == "nvrx" else "in"), row["why"]
        if row["status"] == "in":
            figures = {column.figure for column in COLUMNS} - {"memory_nbytes"}
            assert figures <= row["samples"].keys()
            assert len(row["samples"]["durable_s"]) == 1
    assert [each.name for each in Path.cwd().iterdir()] == ["found.json"]


@pytest.mark.slow
def test_every_contender_loads_what_was_saved() -> None:
    """Warm and cold."""
    contenders = measured("loads")
    assert list(contenders) == [each.name for each in load_contenders()]
    for row in contenders.values():
        assert row["status"] != "in" or len(row["samples"]["cold_s"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "figures"),
    [
        ("restart", {"total_s", "load_s", "first_blocked_s"}),
        ("start", {"cold_s", "cold_load_s", "warm_s"}),
    ],
)
def test_fresh_processes_load_what_was_saved(
    monkeypatch: pytest.MonkeyPatch, command: str, figures: set[str]
) -> None:
    """By each way, and save; or with a prefetch, without, by stock, and not at all."""
    monkeypatch.setattr("sys.executable", loaded.executable())
    for row in measured(command).values():
        assert figures <= row["samples"].keys()


@pytest.mark.slow
def test_two_ranks_start_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun; memory is measured, too."""
    monkeypatch.setattr("sys.executable", loaded.executable())
    monkeypatch.setenv(loaded.EXECUTABLE, loaded.executable())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ("--contenders", "nostall overlapped,dcp.save", "--memory-saves", "1")
    contenders = measured("saves", "--ranks", "2", *options)
    assert {row["status"] for row in contenders.values()} == {"in"}
    samples = {name: row["samples"]["memory_nbytes"] for name, row in contenders.items()}
    assert samples["nostall overlapped"][0] > 0  # it is sampled when the save is over


class Torn(DcpAsyncSave):
    """Says too early that the state may be changed: copies as late as it is polled."""

    def save(self, state: State, path: Path) -> Pending:
        return Pending(lambda: [DcpSave.save(self, state, path)] != [])


class Broken(DcpSave):
    """Can no longer save in the second round."""

    saves = 0

    def save(self, state: State, path: Path) -> Pending | None:
        self.saves += 1
        if self.saves == 3:
            raise OSError(28, "No space left on device")
        return super().save(state, path)


def test_a_wrong_checkpoint_is_told_and_its_contender_left_out() -> None:
    """Beside one that fails, which is told, too, and one that is right."""
    report = saved(Torn("torn"), Broken("broken"), DcpSave("right"))
    status = {row.name: row.status for row in report.contenders}
    assert status == {"torn": "WRONG", "broken": "FAILED", "right": "in"}
    assert report.failed
    report.about = {"options": {}, "machine": {}, "versions": {}}
    text = rendered(report, COLUMNS, LEGEND)
    assert "WRONG: torn: its checkpoint is not what was saved: 216 differ: layers.0.0" in text
    assert "FAILED: broken: OSError: [Errno 28] No space left on device" in text
    assert [line.split()[0] for line in text.splitlines()[4:6]] == ["blocked", "right"]


def test_ratios_are_of_rounds() -> None:
    """A contender is compared with another one of the same round."""
    row = Row(name="a", samples={"durable_s": [1.0, 2.0, 4.0]})
    report = Report(contenders=[row, Row(name="b", samples={"durable_s": [1.0, 1.0, 8.0]})])
    assert Column("/ b", "durable_s", digits=2, over="b").cell(row, report) == "1.00 [0.75, 1.50]"


def test_a_load_that_fills_other_tensors_is_told() -> None:
    """The targets are what counts, not what the state dict holds afterwards."""

    def load(into: State, path: Path) -> None:
        into.update(torch.load(path / "all.pt"))

    writes = load_contenders()[-2].write
    loads = Loads(make_workload("large", 1 << 16), Path.cwd())
    report = measure_loads(loads, [LoadContender(name="x", load=load, write=writes)], rounds=1)
    assert report.contenders[0].status == "WRONG"


def simulated(ranks: int, items: int) -> Found:
    options = ["--ranks", f"{ranks}", "--items", f"{items}", "--rounds", "1"]
    assert main(["ranks", *options, "--json", "found.json"]) == 0
    return stored()[1]


def test_real_ranks_exchange_what_simulated_ones_do(tmp_path: Path) -> None:
    """By ``dcp.save`` with both planners: collectives alike, and bytes within 15 %."""
    counted = simulated(RANKS, 50)
    real = run_ranks(RANKS, "simulated:exchanged", tmp_path / "real", "50")
    for way, by_save in real[0].items():
        for save, found in by_save.items():
            figures = counted[f"{way}, {save}"]["samples"]
            assert figures["collectives"] == [found["collectives"]]
            up_nbytes = sum(each[way][save]["up"] for each in real) / RANKS
            assert figures["up_nbytes"] == [pytest.approx(up_nbytes, rel=0.15)]
            assert figures["down_nbytes"] == [pytest.approx(found["down"], rel=0.15)]


def test_the_steady_state_does_not_depend_on_items() -> None:
    """nostall's later messages do not grow with the number of items; stock's and NVRx's do."""
    few, many = simulated(16, 50), simulated(16, 400)
    for name, row in few.items():
        growth = many[name]["samples"]["up_nbytes"][0] / row["samples"]["up_nbytes"][0]
        is_short = name.startswith("nostall") and name.endswith("later")
        assert (growth < 1.1) if is_short else (growth > 6), name


def test_every_caller_is_measured_in_the_steady_state() -> None:
    """Planning, commit and poll apart; frameworks that are not installed are named."""
    options = ["--tensors", "20", "--rounds", "2", "--json", "found.json"]
    assert main(["callers", *options]) == 0
    _, contenders = stored()
    *others, megatron = contenders.values()
    assert len(others) == 3
    for row in others:
        assert row["status"] == "in", row["why"]
        figures = {name: len(each) for name, each in row["samples"].items()}
        assert figures == {"plan_s": 2, "commit_s": 2, "poll_s": 2}
    is_there = find_spec("megatron") is not None
    assert megatron["status"] == ("in" if is_there else "not available"), megatron["why"]
