"""The benchmark of loads and restarts: what is measured, compared, and refused."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import nostall
from nostall._bench.loading.contender import LoadContender, LoadsRows
from nostall._bench.loading.contenders import (
    DcpLoad,
    TorchLoad,
    load_contenders,
    save_with_nostall,
)
from nostall._bench.loading.limits import COLD_READS, WARM_READS, LoadLimits, ReadSetting
from nostall._bench.loading.measure import LoadTrial, time_rows
from nostall._bench.loading.page_cache import bring_in, cached_share, drop, files_below
from nostall._bench.loading.report import render_loads
from nostall._bench.loading.results import (
    LoadContenderReport,
    LoadLimitReport,
    LoadReport,
    LoadSample,
)
from nostall._bench.loading.rows import eighth, part_of, path_of
from nostall._bench.loading.run import run_loads
from nostall._bench.loading.targets import LOAD_TARGETS
from nostall._bench.machine import file_system_of
from nostall._bench.main import bench_loads, bench_restarts
from nostall._bench.options import LoadOptions, RestartOptions
from nostall._bench.restarting import first_step
from nostall._bench.restarting.report import RestartReport
from nostall._bench.restarting.run import Way
from nostall._bench.tables import failed
from nostall._bench.targets import check_targets
from nostall._bench.workloads import State, Workload, make_workload, tensors_of
from nostall.cli import main
from support.loaded import executable
from support.ranks import run_script

SMALL = 256 << 10
MIB = 1 << 20


def options(directory: Path, **changes: Any) -> LoadOptions:
    """A run that takes a moment."""
    chosen_options: dict[str, Any] = {
        "shape": "large",
        "nbytes": SMALL,
        "rounds": 1,
        "idle_rounds": 0,
        "idle_s": 0.0,
        "contenders": (),
        "directory": directory,
        "json": None,
    }
    return LoadOptions(**{**chosen_options, **changes})


class FakeLoad:
    """Loads from a file of ``torch.save``; a fault is a subclass."""

    name = "fake"
    description = "for tests"
    form = "fake"

    def available(self) -> str | None:
        return None

    def write(self, state: State, path: Path) -> None:
        path.mkdir(parents=True)
        torch.save(dict(tensors_of(state)), path / "all.pt")

    def load(self, path: Path, into: State) -> None:
        loaded = torch.load(path / "all.pt", weights_only=True)
        for name, tensor in tensors_of(into):
            tensor.copy_(loaded[name])

    def forget(self) -> None:
        return None


class LoadsNothing(FakeLoad):
    """Leaves the targets as they are."""

    name = "loads nothing"

    def load(self, path: Path, into: State) -> None:
        return None


class LoadsOnce(FakeLoad):
    """Leaves the targets as they are from the second time on, as if they still had the values."""

    name = "loads once"

    def __init__(self) -> None:
        self._loaded = False

    def load(self, path: Path, into: State) -> None:
        if not self._loaded:
            super().load(path, into)
        self._loaded = True


class LoadsElsewhere(FakeLoad):
    """Puts new tensors into the state dict, and leaves the existing ones alone."""

    name = "loads elsewhere"

    def load(self, path: Path, into: State) -> None:
        into.update(torch.load(path / "all.pt", weights_only=True))


class LoadsOtherRows(FakeLoad):
    """Its slices are one row off."""

    name = "loads other rows"

    def load_rows(self, path: Path, into: dict[str, Tensor], rows: Mapping[str, slice]) -> None:
        loaded = torch.load(path / "all.pt", weights_only=True)
        for name, each in rows.items():
            into[name].copy_(loaded[name][each.start + 1 : each.stop + 1])


class FailsWhenCold(FakeLoad):
    """Its third load fails: the one after the warm-up and the warm round."""

    name = "fails when cold"

    def __init__(self) -> None:
        self._loads = 0

    def load(self, path: Path, into: State) -> None:
        self._loads += 1
        if self._loads > 2:
            raise OSError("no file on this fake")
        super().load(path, into)


class Absent(FakeLoad):
    """Cannot take part."""

    name = "absent"

    def available(self) -> str | None:
        return "it is a fake"


# --- runs -------------------------------------------------------------------------------------


def test_a_run_reports_every_figure_of_every_contender(tmp_path: Path) -> None:
    """All contenders that are here have every sample, all limits are there, all loads are right."""
    contenders = load_contenders()
    report = run_loads(options(tmp_path, rounds=2, idle_rounds=1), contenders)
    assert [each.name for each in report.contenders] == [each.name for each in contenders]
    assert {"nostall.load", "nostall dcp.load crc", "dcp.load", "torch.load mmap"} <= {
        each.name for each in report.contenders if each.unavailable is None
    }
    for contender, each in zip(contenders, report.contenders, strict=True):
        if each.unavailable is not None:
            continue
        assert each.error is None
        assert each.mismatches == ()
        assert [sample.round for sample in each.warm] == [0, 1]
        assert [sample.round for sample in each.idle] == [0]
        assert [sample.round for sample in each.fresh] == [0, 1]
        assert [sample.round for sample in each.cold] == [0, 1]
        assert len(each.one_tensor) == 2
        assert len(each.rows) == (2 if isinstance(contender, LoadsRows) else 0)
    limits = report.limits
    assert limits.memcpy is not None
    assert set(limits.warm_read_s) == {str(setting) for setting in WARM_READS}
    assert set(limits.cold_read_s) >= set(limits.warm_read_s)
    assert not failed(report.contenders)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", ["many", "mixed", "llama3-8b"])
def test_the_other_shapes_are_loaded_as_they_were_saved(tmp_path: Path, shape: str) -> None:
    """Nested state with 0-d tensors and objects, and many small tensors."""
    report = run_loads(options(tmp_path, shape=shape), load_contenders())
    there = [each for each in report.contenders if each.unavailable is None]
    assert [each.error for each in there] == [None] * len(there)
    assert [each.mismatches for each in there] == [()] * len(there)


def test_the_tables_have_all_rows_and_limits(tmp_path: Path) -> None:
    """Contenders, with a second row each after idle seconds, limits, parts and targets."""
    report = run_loads(
        options(tmp_path, idle_rounds=1), [TorchLoad(), *load_contenders()[2:6], Absent()]
    )
    lines = render_loads(report).splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    for name in ("nostall dcp.load", "nostall dcp.load crc", "dcp.load", "torch.load mmap"):
        assert rows.count(name) == 2  # everything, and parts
        assert rows.count(f"{name}, freed memory taken away") == 1
    assert "warm memcpy, one flat copy" in rows
    assert sum(row.startswith("raw read, warm (") for row in rows) == 1
    assert sum(row.startswith("raw read, cold (") for row in rows) == 1
    assert "warm: nostall dcp.load / memcpy" in rows
    assert "cold: nostall dcp.load / raw parallel read" in rows
    assert "not available: absent: it is a fake" in lines
    (left_out,) = (line for line in lines if line.startswith("not measured: "))
    assert "nostall.load / memcpy" in left_out


def test_the_command_line_writes_all_samples_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON file has command, machine, versions, limits, samples and targets."""
    file = tmp_path / "report.json"
    arguments = ["bench", "--load", "--bytes", "256KiB", "--rounds", "1", "--idle-rounds", "0"]
    arguments += ["--contenders", "nostall dcp.load,dcp.load", "--directory", str(tmp_path)]
    arguments += ["--json", str(file)]
    assert main(arguments) == 0
    stored = json.loads(file.read_text())
    assert set(stored) == set(LoadReport.__dataclass_fields__)
    assert stored["command"] == ["python", "-m", "nostall", *arguments]
    assert stored["options"]["idle_rounds"] == 0
    assert [each["name"] for each in stored["contenders"]] == ["nostall dcp.load", "dcp.load"]
    for each in stored["contenders"]:
        assert set(each) == set(LoadContenderReport.__dataclass_fields__)
        assert set(each["warm"][0]) == set(LoadSample.__dataclass_fields__)
        assert each["rows"][0]["read_nbytes"] > 0
    assert len(stored["limits"]["memcpy_s"]) == 1
    verdicts = {each["figure"]: each for each in stored["targets"]}
    assert verdicts["warm: nostall dcp.load / memcpy"]["measured"] > 0
    assert verdicts["warm: nostall.load / memcpy"]["met"] is None
    assert "| nostall dcp.load " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (LoadsNothing, "warm load: 216 differ"),
        (LoadsOnce, "warm load: 216 differ"),
        (LoadsElsewhere, "warm load: 216 differ"),
        (LoadsOtherRows, "1/8 of the rows: 216 differ"),
    ],
    ids=["nothing", "once", "elsewhere", "other-rows"],
)
def test_a_load_that_leaves_other_values_is_an_error(
    wrong: type[FakeLoad], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named, with what differs, and the exit status is 1; the others are measured."""
    contenders = [wrong(), FakeLoad()]
    assert bench_loads(options(tmp_path), contenders, []) == 1
    shown = capsys.readouterr().out
    (said,) = (line for line in shown.splitlines() if line.startswith("ERROR"))
    assert f"{wrong.name} did not load what was saved" in said
    assert kind in said
    assert "| WRONG" not in next(line for line in shown.splitlines() if line.startswith("| fake "))


def test_a_failing_contender_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    """Its error is in the report with what was measured until then."""
    report = run_loads(options(tmp_path), [FailsWhenCold(), FakeLoad()])
    bad, good = report.contenders
    assert bad.error == "OSError: no file on this fake"
    assert (len(bad.warm), len(bad.cold)) == (1, 0)
    assert (len(good.cold), len(good.one_tensor)) == (1, 1)
    assert not failed(report.contenders)
    assert "FAILED: fails when cold: OSError: no file on this fake" in render_loads(report)


def test_nobody_to_measure_is_a_failure(tmp_path: Path) -> None:
    """A run without a figure does not look like a good one."""
    assert bench_loads(options(tmp_path), [Absent()], []) == 1


def test_every_load_of_everything_is_a_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``nostall.load`` caches metadata for the process, which a restart does not have."""
    cached = nostall.CachedMetadataFileSystemReader
    known: list[bool] = []

    def load(state: State, path: Path, **_: object) -> None:
        known.append(bool(cached._cache))
        dcp.load(state, storage_reader=cached(path))

    monkeypatch.setattr(nostall, "load", load)
    (own,) = run_loads(options(tmp_path, rounds=2), load_contenders()[:1]).contenders
    assert own.name == "nostall.load"
    assert own.mismatches == ()
    # Warm-up, warm, cold; parts, once more; fresh pages.
    assert known == [False] * 5 + [False, True] * 2 + [False] * 2


# --- figures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kept", "fresh"])
def test_temporary_tensors_have_pages_at_hand_or_fresh_ones(tmp_path: Path, kind: str) -> None:
    """In the rounds of fresh pages each is mapped anew; else the second one has the first's."""
    done = run_script("programs/temporary_tensors.py", kind, "4", cwd=tmp_path, timeout_s=60)
    assert done.returncode == 0, done.stderr
    faults = int(done.stdout)
    # A huge page is one fault.
    assert faults >= 8 if kind == "fresh" else faults < 8 * 4 * MIB // mmap.PAGESIZE // 2


def dcp_loads() -> dict[str, DcpLoad]:
    """Those with a planner, by name."""
    return {each.name: each for each in load_contenders() if isinstance(each, DcpLoad)}


def test_what_is_read_for_rows_is_counted(tmp_path: Path) -> None:
    """nostall's reader reads an eighth and little more; stock, and checksums, everything."""
    state = {f"weight{number}": torch.rand(1024, 256) for number in range(4)}
    trial = LoadTrial.of(Workload("large", state), tmp_path, 0.0)
    save_with_nostall(state, tmp_path / "dcp")
    found = dcp_loads()

    def read_nbytes(name: str) -> int:
        sample, wrong = time_rows(trial, found[name], tmp_path / "dcp", 0)
        assert wrong is None
        assert sample.read_nbytes is not None
        return sample.read_nbytes

    for name in found:
        read_nbytes(name)  # imports count, too
    few = read_nbytes("nostall dcp.load")
    assert 4 * MIB // 8 < few < 4 * MIB // 8 + 128 * 1024
    assert read_nbytes("dcp.load") > 4 * MIB
    assert read_nbytes("nostall dcp.load crc") > 4 * MIB


def loaded(
    name: str, warm_s: float, *, cached: float = 1.0, wrong: str = ""
) -> LoadContenderReport:
    """A contender with one sample per phase."""
    warm = LoadSample(round=0, load_s=warm_s, cpu_s=0.0, system_s=0.0, cached=cached)
    cold = LoadSample(round=0, load_s=2 * warm_s, cpu_s=0.0, system_s=0.0, cached=1 - cached)
    return LoadContenderReport(
        name=name,
        description="",
        unavailable=None,
        error=None,
        warm=(warm,),
        idle=(),
        fresh=(),
        cold=(cold,),
        one_tensor=(),
        rows=(),
        mismatches=(wrong,) if wrong else (),
    )


def reported(*contenders: LoadContenderReport, shape: str, crc32: str = "isal") -> LoadReport:
    """A report of these contenders; the copy takes 1 s, the cold read 2 s."""
    return LoadReport(
        command=(),
        options={"shape": shape, "rounds": 7},
        machine={
            "cpu": "a",
            "cpus_usable": 1,
            "memory_nbytes": 1,
            "file_system": "b",
            "torch_threads": 1,
        },
        versions={"torch": "c", "nostall": "d", "crc32": crc32},
        nbytes=1,
        tensors=1,
        sliced_tensors=0,
        rows_nbytes=0,
        metadata_nbytes=None,
        contenders=contenders,
        limits=LoadLimitReport(
            memcpy_s=(1.0,),
            warm_read_s={"slow": (3.0,), "fast": (1.5,)},
            cold_read_s={"slow": (9.0,), "fast": (2.0,)},
        ),
        targets=(),
    )


def verdicts(report: LoadReport) -> dict[str, tuple[float | None, bool | None]]:
    """What is measured for each target, and whether it is met."""
    shape = report.options["shape"]
    checked = check_targets(LOAD_TARGETS, report, shape=shape)
    return {each.figure: (each.measured, each.met) for each in checked}


def test_targets_are_met_missed_or_not_measured() -> None:
    """Against the copy when warm, against the best read when cold, against stock for many."""
    large = reported(
        loaded("nostall dcp.load", 1.5), loaded("nostall dcp.load crc", 1.6), shape="large"
    )
    found = verdicts(large)
    assert found["warm: nostall dcp.load / memcpy"] == (1.5, False)
    assert found["cold: nostall dcp.load / raw parallel read"] == (1.5, False)
    assert found["warm: nostall.load / memcpy"] == (None, None)
    cost, met = found["warm: nostall dcp.load, more time with checksums"]
    assert cost == pytest.approx(100 / 15)
    assert met
    many = verdicts(
        reported(
            loaded("dcp.load", 12.0),
            loaded("nostall dcp.load", 2.0),
            loaded("nostall.load", 1.0),
            shape="many",
        )
    )
    assert many["warm: dcp.load / nostall dcp.load"] == (6.0, True)
    assert many["warm: dcp.load / nostall.load"] == (12.0, False)


def test_checksums_by_zlib_are_not_judged() -> None:
    """The target is for the extra ``fast``."""
    report = reported(
        loaded("nostall dcp.load", 1.0),
        loaded("nostall dcp.load crc", 3.0),
        shape="large",
        crc32="zlib",
    )
    assert verdicts(report)["warm: nostall dcp.load, more time with checksums"] == (None, None)


def test_files_that_stayed_in_the_page_cache_are_mentioned() -> None:
    """A cold figure that is not cold says so, and so does a warm one."""
    shown = render_loads(reported(loaded("dcp.load", 1.0, cached=0.5), shape="large"))
    assert "not cold: 50% of the files of dcp.load stayed in the page cache" in shown
    assert "not warm: 50% of the files of dcp.load were in the page cache" in shown
    assert "not cold" not in render_loads(reported(loaded("dcp.load", 1.0), shape="large"))


# --- page cache, limits and parts ---------------------------------------------------------------


def test_files_are_brought_into_the_page_cache_and_dropped_from_it(tmp_path: Path) -> None:
    """All of their pages, and none: what warm and cold mean."""
    if file_system_of(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("files in memory cannot be dropped")
    file = tmp_path / "folder" / "file"
    file.parent.mkdir()
    with file.open("wb") as stream:
        stream.write(bytes(3 * MIB + 1))
        stream.flush()
        os.fsync(stream.fileno())
    (tmp_path / "empty").touch()
    files = files_below(tmp_path)
    assert files == [tmp_path / "empty", file]
    bring_in(files)
    assert cached_share(files) == 1.0
    drop(files)
    assert cached_share(files) < 0.1
    assert cached_share([tmp_path / "empty"]) == 0.0


@pytest.mark.parametrize("setting", COLD_READS, ids=str)
def test_the_raw_read_reads_the_whole_file(tmp_path: Path, setting: ReadSetting) -> None:
    """With any number of threads, to the last byte, also past one chunk."""
    file = tmp_path / "file"
    content = torch.randint(0, 256, (9 * MIB + 5,), dtype=torch.uint8).numpy().tobytes()
    file.write_bytes(content)
    limits = LoadLimits(file, 8 * MIB)
    limits._pages[:] = bytes(len(limits._pages))
    if limits.read_s(setting) is None:
        pytest.skip("the file system refuses O_DIRECT")
    assert limits._pages[: len(content)] == content
    assert limits.memcpy_s() > 0
    assert limits._copy.numpy().tobytes() == content[: 8 * MIB]


def test_one_tensor_is_found_below_keys_with_dots() -> None:
    """A part has the structure of the whole, so that any loader finds the tensor by its name."""
    state = {"model": {"a": torch.ones(2), "a.b": {"c": torch.ones(3)}}, "model.x": torch.ones(1)}
    for name, tensor in tensors_of(state):
        part = part_of(state, path_of(state, name))
        ((found, blank),) = tensors_of(part)
        assert found == name
        assert blank.shape == tensor.shape
        assert not blank.any()
    with pytest.raises(KeyError):
        path_of(state, "model.b")


def test_an_eighth_is_rows_from_the_middle() -> None:
    """Of tensors with fewer than eight rows there is none."""
    assert eighth(torch.zeros(16, 3)) == slice(6, 8)
    assert eighth(torch.zeros(9)) == slice(3, 4)
    assert eighth(torch.zeros(7)) is None
    assert eighth(torch.zeros(())) is None


# --- restarts ---------------------------------------------------------------------------------


def restart_options(directory: Path, **changes: Any) -> RestartOptions:
    """One process each."""
    chosen_options: dict[str, Any] = {
        "shape": "large",
        "nbytes": SMALL,
        "rounds": 1,
        "contenders": (),
        "directory": directory,
        "json": None,
    }
    return RestartOptions(**{**chosen_options, **changes})


def test_a_restart_is_divided_into_its_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New processes of nostall and stock load tensors and objects; JSON has every stage."""
    monkeypatch.setattr("sys.executable", executable())
    file = tmp_path / "report.json"
    arguments = ["bench", "--restart", "--shape", "mixed", "--bytes", "1MiB", "--rounds", "1"]
    arguments += ["--directory", str(tmp_path), "--json", str(file)]
    assert main(arguments) == 0
    stored = json.loads(file.read_text())
    assert set(stored) == set(RestartReport.__dataclass_fields__)
    found = {each["name"]: each for each in stored["contenders"]}
    assert set(found) == {"nostall.load", "nostall dcp.load", "dcp.load"}
    for name in ("nostall.load", "nostall dcp.load", "dcp.load"):
        assert found[name]["error"] is None
        assert found[name]["mismatches"] == []
        (sample,) = found[name]["samples"]
        expected = set(first_step.STAGES) - ({first_step.NOSTALL} if name == "dcp.load" else set())
        assert set(sample["stages_s"]) == expected
        assert all(seconds >= 0 for seconds in sample["stages_s"].values())
    shown = capsys.readouterr().out
    assert "| interpreter, torch | nostall | finding | metadata | planning | reading |" in shown
    assert "| dcp.load " in shown


@pytest.mark.parametrize("way", ["nostall.load", "nostall dcp.load", "dcp.load"])
def test_a_restart_with_other_values_is_wrong(way: str, tmp_path: Path) -> None:
    """Tensors and objects are compared with what was to be saved."""
    workload = make_workload("large", SMALL, rank=0, world_size=1)  # without the known values
    objects = {**first_step.OBJECTS_OF_TRAINER, "step": 1001}
    state = {**workload.state, first_step.TRAINER: objects}
    save_with_nostall({"other": torch.ones(1)}, tmp_path / "step-8")
    save_with_nostall(state, tmp_path / "step-9")
    answer = first_step.first_step(way, "large", SMALL, tmp_path, 0.0)
    assert len(answer["wrong"]) == 217
    assert answer["wrong"][-1] == "step"


class FakeWay(Way):
    """Answers at once."""

    def __init__(self, name: str, answer: dict[str, Any]) -> None:
        super().__init__(name, "for tests")
        self._answer = answer

    def start(self, options: RestartOptions, root: Path) -> dict[str, Any]:
        return self._answer


def test_a_wrong_restart_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named; a process that fails is, too, and the others are measured."""
    monkeypatch.setattr("sys.executable", executable())
    seconds = dict.fromkeys(first_step.STAGES, 0.1)
    right = FakeWay("right", {"seconds": seconds, "wrong": []})
    assert bench_restarts(restart_options(tmp_path), [right], []) == 0
    wrong = FakeWay("wrong", {"seconds": seconds, "wrong": ["a", "b"]})
    assert bench_restarts(restart_options(tmp_path), [right, wrong], []) == 1
    assert "ERROR: wrong did not load what was saved: a, b" in capsys.readouterr().out
    assert bench_restarts(restart_options(tmp_path), [right, Way("nobody", "")], []) == 0
    shown = capsys.readouterr().out
    assert "FAILED: nobody: ChildProcessError: status 1: " in shown
    assert "| right " in shown


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--load", "--restart"], "not allowed with"),
        (["--load", "--ranks", "2"], "--load measures one process, not 2 ranks"),
        (["--restart", "--ranks", "2"], "--restart measures one process, not 2 ranks"),
        (["--load", "--noise"], "--noise has no meaning with --load"),
        (["--load", "--overwrite"], "--overwrite has no meaning with --load"),
        (["--load", "--plot", "a.png"], "--plot has no meaning with --load"),
        (["--load", "--plain-saves", "3"], "--plain-saves has no meaning with --load"),
        (["--load", "--memory-saves", "0"], "--memory-saves has no meaning with --load"),
        (["--load", "--slowdown-rounds", "0"], "--slowdown-rounds has no meaning with --load"),
        (["--load", "--no-probes"], "--no-probes has no meaning with --load"),
        (["--restart", "--idle-rounds", "1"], "--idle-rounds has no meaning with --restart"),
        (["--restart", "--idle-seconds", "1"], "--idle-seconds has no meaning with --restart"),
        (["--load", "--contenders", "nobody"], "no contender matches 'nobody'"),
        (["--restart", "--contenders", "torch.*"], "no contender matches 'torch.*'"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one line that names the option, before anything is measured; status 2."""
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of its processes would measure the others."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--load"])
    assert "--load measures one process, not 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("--load", ["nostall.load", "nostall dcp.load crc", "torch.load mmap", "safetensors"]),
        ("--restart", ["nostall.load", "nostall dcp.load", "dcp.load"]),
    ],
    ids=["load", "restart"],
)
def test_the_list_names_every_contender(
    kind: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """``--list`` measures nothing and says who could take part."""
    assert main(["bench", kind, "--list"]) == 0
    shown = capsys.readouterr().out
    for name in names:
        assert f"\n{name} " in f"\n{shown}"


def test_contenders_follow_their_protocol() -> None:
    """Those of one form write the same files, so any of them may write them."""
    contenders: list[LoadContender] = load_contenders()
    assert len({each.name for each in contenders}) == len(contenders)
    assert {each.form for each in contenders if isinstance(each, LoadsRows)} == {"dcp"}
