"""The benchmark measures, checks what was written, and survives a bad contender; untimed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nostall
from nostall import _torch
from nostall._bench import plot
from nostall._bench.contender import Contender, Durable, Pending, PendingFuture, Setting
from nostall._bench.entry import Entry
from nostall._bench.free_memory import warm_free_memory
from nostall._bench.limits import WRITE_SETTINGS, Limits, WriteSetting
from nostall._bench.llama import ELEMENT_NBYTES, PARAMETERS, RANKS, sizes_for
from nostall._bench.machine import file_system_of
from nostall._bench.options import BenchOptions, chosen
from nostall._bench.ours import own_contenders
from nostall._bench.processes import memory_sampler, noise, tree_cpu_time
from nostall._bench.quantities import Spread, format_nbytes, median_of, parse_nbytes
from nostall._bench.ranks import Ranks
from nostall._bench.report import render
from nostall._bench.results import (
    BenchReport,
    ContenderReport,
    FirstSaves,
    MemoryFigures,
    ProbeReport,
    SaveSample,
)
from nostall._bench.room import (
    nbytes_of_loads,
    nbytes_of_restarts,
    nbytes_of_saves,
    why_no_room,
)
from nostall._bench.run import run
from nostall._bench.stock import DcpSave, TorchSave
from nostall._bench.tables import failed
from nostall._bench.transformer import train_one_step, training_nbytes, width_for
from nostall._bench.workloads import State, differences, make_workload, tensors_of
from nostall.cli import main
from support import loaded
from support.waiting import wait_until

SMALL = 256 << 10
ALONE = Ranks(0, 1, None)


def options(directory: Path, **changes: Any) -> BenchOptions:
    """A run that takes a moment."""
    chosen_options: dict[str, Any] = {
        "shape": "large",
        "nbytes": SMALL,
        "ranks": 1,
        "rounds": 1,
        "idle_rounds": 0,
        "idle_s": 0.0,
        "plain_saves": 0,
        "memory_saves": 0,
        "slowdown_rounds": 0,
        "contenders": (),
        "directory": directory,
        "json": None,
        "plot": None,
        "noise": False,
        "overwrite": False,
        "probes": False,
    }
    return BenchOptions(**{**chosen_options, **changes})


class FakeContender:
    """Saves with ``torch.save``; a fault is a subclass."""

    name = "fake"
    description = "for tests"
    warmups = 0

    def __init__(self) -> None:
        self.opened = 0
        self.closed = 0

    def available(self) -> str | None:
        return None

    def open(self, setting: Setting) -> None:
        self.opened += 1

    def save(self, state: State, path: Path) -> Pending:
        path.mkdir(parents=True)
        torch.save(state, path / "all.pt")
        return Durable()

    def load(self, path: Path, into: State) -> State:
        loaded: State = torch.load(path / "all.pt", weights_only=True)
        return loaded

    def close(self) -> None:
        self.closed += 1


class Stale(FakeContender):
    """Writes what the first save was given, whatever the state is by then."""

    name = "stale"

    def __init__(self) -> None:
        super().__init__()
        self._first: State = {}

    def save(self, state: State, path: Path) -> Pending:
        self._first = self._first or {name: tensor.clone() for name, tensor in state.items()}
        return super().save(self._first, path)


class Torn(FakeContender):
    """Takes no snapshot: writes when it is polled, and the state has changed by then."""

    name = "torn"

    def save(self, state: State, path: Path) -> Pending:
        write_now = super().save

        class Late:
            def poll(self) -> bool:
                write_now(state, path)
                return True

            def wait_staged(self) -> None:
                return None

        return Late()


class Unreadable(FakeContender):
    """Writes a checkpoint that does not load."""

    name = "unreadable"

    def save(self, state: State, path: Path) -> Pending:
        path.mkdir(parents=True)
        (path / "all.pt").write_bytes(b"PK")
        return Durable()


class FailsLater(FakeContender):
    """Its second save fails in the background."""

    name = "fails later"

    def save(self, state: State, path: Path) -> Pending:
        self.opened += 1
        if self.opened < 3:
            return super().save(state, path)
        failure: Future[None] = Future()
        failure.set_exception(OSError("no space left on this fake"))
        return PendingFuture(failure)


class Absent(FakeContender):
    """Cannot take part."""

    name = "absent"

    def available(self) -> str | None:
        return "it is a fake"


def measured(tmp_path: Path, *contenders: Contender, **changes: Any) -> BenchReport:
    return run(options(tmp_path, **changes), contenders, ALONE)


# --- runs -------------------------------------------------------------------------------------


def test_a_run_reports_every_figure_of_every_contender(tmp_path: Path) -> None:
    """One tiny run of our own contenders and a stock one has every sample, all of them right."""
    ours = [each for each in own_contenders() if each.available() is None]
    report = measured(tmp_path, *ours, TorchSave(), rounds=2, memory_saves=3, slowdown_rounds=1)
    assert [each.error for each in report.contenders] == [None] * len(report.contenders)
    for each in report.contenders:
        assert [save.round for save in each.saves] == [0, 1]
        assert all(
            0 < save.call_s <= save.blocked_s <= save.durable_s * 1.001 for save in each.saves
        )
        assert each.memory is not None
        assert len(each.memory.peaks_nbytes) == 3
        assert each.verification is not None
        assert each.verification.mismatches == ()
    loops = [sample.loop for sample in report.contenders[0].slowdowns]
    assert loops == ["python", "matmul"]
    assert not failed(report.contenders)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", ["many", "mixed", "llama3-8b", "lora"])
def test_the_other_shapes_are_saved_and_come_back(tmp_path: Path, shape: str) -> None:
    """Nested state with optimizer entries and 0-d tensors, and many small ones, survive a run."""
    report = measured(tmp_path, own_contenders()[0], shape=shape)
    (ours,) = report.contenders
    assert ours.error is None
    assert ours.verification is not None
    assert ours.verification.mismatches == ()


@pytest.mark.parametrize("wrong", [Stale, Torn], ids=["stale", "torn"])
def test_wrong_data_is_an_error(tmp_path: Path, wrong: type[FakeContender]) -> None:
    """A contender that writes an old state, or a state that changed after the call, is caught."""
    report = measured(tmp_path, wrong(), FakeContender(), rounds=2)
    bad, good = report.contenders
    assert bad.verification is not None
    assert "216 differ" in bad.verification.mismatches[0]
    assert good.verification is not None
    assert good.verification.mismatches == ()
    assert failed(report.contenders)
    assert f"ERROR: {bad.name} did not write what was saved" in render(report)


def test_a_checkpoint_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    """It is as wrong as one with other values."""
    report = measured(tmp_path, Unreadable())
    (bad,) = report.contenders
    assert bad.verification is not None
    assert "it cannot be loaded" in bad.verification.mismatches[0]
    assert failed(report.contenders)


def test_a_failing_contender_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    """Its error is in the report, it is closed, and all others are measured to the end."""
    bad, good = FailsLater(), FakeContender()
    report = measured(tmp_path, bad, good, Absent(), rounds=3)
    first, second, absent = report.contenders
    assert first.error == "OSError: no space left on this fake"
    assert len(first.saves) == 1
    assert first.verification is None
    assert len(second.saves) == 3
    assert absent.unavailable == "it is a fake"
    assert (bad.closed, good.closed) == (1, 1)
    assert not failed(report.contenders)
    shown = render(report)
    assert "FAILED: fails later: OSError: no space left on this fake" in shown
    (left_out,) = (line for line in shown.splitlines() if line.startswith("not measured: "))
    assert "loss of a pure-Python loop" in left_out
    assert not any("not measured" in line for line in shown.splitlines() if line.startswith("|"))


def took(durable_s: float, system_s: float) -> SaveSample:
    """A save of a synchronous contender."""
    return SaveSample(
        round=0,
        call_s=durable_s,
        finish_s=0.0,
        blocked_s=durable_s,
        durable_s=durable_s,
        cpu_s=system_s,
        system_s=system_s,
    )


def test_a_plain_loop_is_compared_without_the_saves_that_needed_fresh_memory() -> None:
    """Rounds have warm memory, so a save that paid for pages is shown, and not compared."""
    report = ContenderReport(
        name="dcp.save",
        description="",
        unavailable=None,
        error=None,
        saves=(took(1.0, 0.2), took(1.1, 0.3)),
        idle_saves=(),
        plain_saves=(took(1.0, 0.25), took(3.6, 3.0), took(2.0, 1.2)),
        memory=None,
        slowdowns=(),
        verification=None,
    )
    assert report.warm_plain_saves == report.plain_saves[:1]
    assert report.median("durable_s", "plain_saves") == pytest.approx(2.0)
    assert report.to_plain == pytest.approx(1.05)
    cold = dataclasses.replace(report, plain_saves=report.plain_saves[1:])
    assert cold.to_plain is None


def test_a_plain_loop_ends_when_enough_saves_found_memory_at_hand() -> None:
    """Those that paid for fresh pages are made again."""
    entry = Entry(contender=DcpSave(), unavailable=None, saves=[took(1.0, 0.2)])
    entry.plain_saves = [took(1.0, 0.2), took(1.0, 2.0), took(1.0, 3.0)]
    assert entry.has_plain_saves(1)
    assert not entry.has_plain_saves(2)
    entry.plain_saves.append(took(1.0, 0.3))
    assert entry.has_plain_saves(2)


def test_several_ranks_without_numpy_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's collectives of objects need it; the error names the option and what to install."""
    monkeypatch.setattr(_torch, "has_numpy", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--ranks", "2"])
    assert "--ranks above 1 needs NumPy" in capsys.readouterr().err


def test_stock_is_compared_with_a_plain_loop_and_with_memory_that_was_taken_away(
    tmp_path: Path,
) -> None:
    """Both are measured with the very same calls, and shown beside the rounds."""
    report = measured(tmp_path, DcpSave(), idle_rounds=2, plain_saves=3)
    (stock,) = report.contenders
    assert [save.round for save in stock.idle_saves] == [0, 1]
    assert [save.round for save in stock.plain_saves] == list(range(len(stock.plain_saves)))
    warm = len(stock.warm_plain_saves)
    assert warm == 3 or (warm < 3 and len(stock.plain_saves) == 12)
    here, plain = stock.median("durable_s"), stock.median("durable_s", "warm_plain_saves")
    assert here is not None
    assert plain is not None
    assert stock.to_plain == pytest.approx(here / plain)
    shown = render(report)
    assert "freed memory was taken away by the hypervisor" in shown
    (off,) = (each.measured for each in report.targets if "plain loop" in each.figure)
    assert off is not None
    assert stock.to_plain is not None
    assert off == pytest.approx(abs(stock.to_plain - 1) * 100)
    assert list(tmp_path.iterdir()) == []


def test_the_scratch_file_is_as_large_as_a_copy_and_its_page_cache(tmp_path: Path) -> None:
    """Free memory is warmed by a file of twice the saved bytes, of which nothing stays.

    It is there until all ranks have written theirs, so that together they take as much memory as
    the ranks will.
    """
    there: list[int] = []

    def barrier() -> None:
        there.extend(file.stat().st_size for file in tmp_path.iterdir())

    warm_free_memory(tmp_path, 3_000_001, rank=0, barrier=barrier)
    assert there == [6_000_002]
    assert list(tmp_path.iterdir()) == []


def test_a_first_save_is_split_into_copy_memory_and_the_rest() -> None:
    """What any program pays for new memory is not the library's; after a warm-up it is nothing."""
    figures: dict[str, Any] = {"fresh_memory_found_s": 2.0, "fresh_memory_s": 0.5}
    figures |= {"contender": "nostall", "durable_s": (1.0, 9, 9, 0.5, 0.4, 0.6)}
    cold = FirstSaves(warmed_up=False, blocked_s=(1.0, 9, 9, 0.2, 0.1, 0.3), **figures)
    warm = FirstSaves(warmed_up=True, blocked_s=(0.5, 9, 9, 0.2, 0.1, 0.3), **figures)
    assert (cold.steady_s, cold.paid_for_memory_s) == (0.2, 0.5)
    assert cold.rest_s == pytest.approx(0.3)
    assert warm.rest_s == pytest.approx(0.3)


def test_a_first_save_is_judged_by_the_slower_contender_and_the_larger_ratio() -> None:
    """Blocked and durable, split and ``dcp.async_save``: none may hide behind another."""
    figures = {"fresh_memory_found_s": 0.0, "fresh_memory_s": 0.0}
    quick = FirstSaves(
        contender="nostall",
        warmed_up=True,
        blocked_s=(1.0, 9, 9, 1.0),
        durable_s=(1.0, 9, 9, 1.0),
        **figures,
    )
    late = dataclasses.replace(
        quick, contender="nostall dcp.async_save", durable_s=(3.0, 9, 9, 1.0)
    )
    cold = dataclasses.replace(quick, warmed_up=False, blocked_s=(7.0, 9, 9, 1.0))
    probes = ProbeReport(
        writer_start_s=(),
        writer_resident_nbytes=(),
        import_s=(),
        first_saves=(quick, late, late, cold),
    )
    assert probes.first_to_steady == 3.0
    assert dataclasses.replace(probes, first_saves=(quick, cold)).first_to_steady == 1.0
    assert dataclasses.replace(probes, first_saves=(cold,)).first_to_steady is None


def test_the_command_line_writes_all_samples_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON file has command, machine, versions, limits, samples and targets."""
    file = tmp_path / "report.json"
    arguments = ["bench", "--bytes", "256KiB", "--rounds", "1", "--contenders", "nostall,dcp.save"]
    arguments += ["--memory-saves", "2", "--slowdown-rounds", "1", "--no-probes"]
    arguments += ["--idle-rounds", "0", "--plain-saves", "1"]
    arguments += ["--directory", str(tmp_path), "--json", str(file), "--noise"]
    assert main(arguments) == 0
    stored = json.loads(file.read_text())
    assert set(stored) == set(BenchReport.__dataclass_fields__)
    assert stored["command"] == ["python", "-m", "nostall", *arguments]
    assert stored["machine"].keys() >= {"cpu_count", "memory_nbytes", "file_system"}
    assert stored["versions"]["nostall"] == nostall.__version__
    assert stored["versions"]["torch"] == str(torch.__version__)
    assert [each["name"] for each in stored["contenders"]] == ["nostall", "dcp.save"]
    assert stored["contenders"][0]["saves"][0].keys() == {
        *("round", "call_s", "finish_s", "blocked_s", "durable_s", "cpu_s", "system_s")
    }
    assert set(stored["limits"]["raw_write_s"]) == {str(each) for each in WRITE_SETTINGS}
    verdicts = {each["figure"]: each for each in stored["targets"]}
    assert verdicts["blocked / warm memcpy"]["measured"] > 0
    assert verdicts["import nostall"]["met"] is None
    assert "| nostall " in capsys.readouterr().out


def test_two_ranks_start_themselves_and_agree(tmp_path: Path) -> None:
    """``--ranks 2`` starts torchrun, saves collectively, verifies both parts, reports once."""
    file = tmp_path / "report.json"
    command = [*loaded.python(), "-m", "nostall", "bench", "--ranks", "2", "--bytes", "256KiB"]
    command += ["--rounds", "1", "--contenders", "nostall,nostall dcp.save,torch.save"]
    command += ["--memory-saves", "2", "--slowdown-rounds", "1", "--no-probes"]
    command += ["--idle-rounds", "0", "--plain-saves", "1"]
    command += ["--directory", str(tmp_path), "--json", str(file)]
    root = str(Path(nostall.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    environment[loaded.EXECUTABLE] = loaded.executable()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("large: 256") == 1
    stored = json.loads(file.read_text())
    assert stored["options"]["ranks"] == 2
    for each in stored["contenders"]:
        assert each["error"] is None
        assert each["verification"]["mismatches"] == []
        assert len(each["saves"]) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["bench", "--bytes", "lots"], "not a size"),
        (["bench", "--contenders", "nobody"], "no contender matches 'nobody'"),
        (["bench", "--rounds", "0"], "not a whole number of 1 or more"),
    ],
    ids=["size", "contender", "rounds"],
)
def test_wrong_arguments_end_with_usage(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused before anything is measured, with exit status 2."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind", [[], ["--ranks", "2"], ["--load"], ["--restart"]], ids=["save", "ranks", "load", "new"]
)
def test_a_run_that_does_not_fit_into_memory_is_refused(
    kind: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before anything is allocated or written; with what is needed, and what is there.

    A limit of a control group counts as the memory of the machine does.
    """
    if kind == ["--ranks", "2"]:
        pytest.importorskip("numpy", reason="the message about NumPy comes first")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--bytes", "100000GiB", "--directory", str(tmp_path), *kind])
    assert ended.value.code == 2
    assert re.search(
        r"this run needs about [\d,.]+ TiB of memory, and \S+ [GM]iB are available",
        capsys.readouterr().err,
    )
    assert not any(tmp_path.iterdir())


def test_what_a_run_needs_grows_with_the_contenders_and_fits_a_control_group(
    tmp_path: Path,
) -> None:
    """One contender takes part where two have no room, and restarts where loads have none."""
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(str(1 << 29))
    (group / "memory.current").write_text(str(1 << 28))
    for contenders, fits in ((0, True), (1, True), (2, False)):
        needed = nbytes_of_saves(1 << 26, contenders)
        assert (why_no_room(needed, root=str(tmp_path)) is None) == fits, contenders
    assert why_no_room(nbytes_of_restarts(1 << 26), root=str(tmp_path)) is None
    said = why_no_room(nbytes_of_loads(1 << 26), root=str(tmp_path))
    assert said is not None
    assert "needs about 320 MiB of memory, and 256 MiB are available" in said


def test_the_list_names_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    """``--list`` measures nothing and says who could take part."""
    assert main(["bench", "--list", "--contenders", "dcp.save"]) == 0
    assert "nostall" not in capsys.readouterr().out
    for wrong, said in (
        (["--list", "--contenders", "misspelt"], "no contender matches 'misspelt'"),
        (["--directory", "nowhere"], "'nowhere' is not an existing directory"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", *wrong])
        assert said in capsys.readouterr().err
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in ("nostall ", "torch.save", "dcp.async_save process", "torchsnapshot", "nvrx"):
        assert f"\n{name}" in f"\n{shown}"


def test_the_command_line_imports_no_torch() -> None:
    """Help and argument errors come at once."""
    program = "import sys, nostall.cli; sys.exit('torch' in sys.modules)"
    root = str(Path(nostall.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": root}, check=False
    )
    assert done.returncode == 0


def test_without_matplotlib_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--plot`` is refused before the run, with the extra to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["bench", "--plot", "picture.png"])
    assert "nostall[plot]" in capsys.readouterr().err


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """Bars and timelines of a real run end up in a PNG file."""
    pytest.importorskip("matplotlib", reason="the extra `plot` installs it")
    picture = tmp_path / "picture.png"
    report = measured(tmp_path, own_contenders()[0], plot=picture)
    assert any(step.saving for step in report.timeline)
    plot.draw(report, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


# --- limits and helpers -----------------------------------------------------------------------


@pytest.mark.parametrize("preallocate", [False, True], ids=["growing", "preallocated"])
@pytest.mark.parametrize("threads", [1, 4])
def test_the_raw_write_writes_the_same_bytes(
    tmp_path: Path, threads: int, *, preallocate: bool
) -> None:
    """The file of the limit holds exactly the bytes of the tensors, past one chunk, too."""
    tensors = [torch.rand(3_000_000), torch.rand(())]
    limits = Limits(tensors)
    file = tmp_path / "raw"
    limits.raw_write(file, WriteSetting(threads=threads, preallocate=preallocate))
    assert file.read_bytes() == b"".join(tensor.numpy().tobytes() for tensor in tensors)


def test_the_copies_copy_everything() -> None:
    """Both copies of the limits move exactly the bytes of the tensors."""
    tensors = [torch.rand(1000), torch.rand(()).double(), torch.rand(7, 3)]
    limits = Limits(tensors)
    for tensor in tensors:
        tensor.add_(1)
    assert limits.foreach_copy_s() > 0
    assert all(map(torch.equal, limits._copies, tensors))
    assert limits.memcpy_s() > 0
    assert torch.equal(limits._copy, limits._source)
    assert limits._copy.nbytes == sum(tensor.nbytes for tensor in tensors)


def test_the_memory_sampler_sees_a_peak_that_is_over() -> None:
    """Memory of a child counts, and a peak between two looks is not lost."""
    program = (
        "b = bytearray(64 << 20); print(flush=True); input(); del b; print(flush=True); input()"
    )
    with memory_sampler() as sampler:
        before, _ = sampler.level()
        sleeps = psutil.Process(sampler._process.pid).num_ctx_switches
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            held = sleeps().voluntary
            wait_until(lambda: sleeps().voluntary > held + 5)  # it has looked by itself
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.stdout.readline()
            _, peak = sampler.level()
            child.communicate(b"\n")
    assert peak - before > 60 << 20


def test_cpu_time_of_ended_children_counts() -> None:
    """An ended child leaves its CPU seconds in the sum; an excluded one does not while it runs."""
    before = tree_cpu_time()
    subprocess.run([sys.executable, "-c", "sum(range(6_000_000))"], check=True)
    used = tree_cpu_time().since(before)
    assert used.user_s + used.system_s >= 0.03


def test_the_noise_ends_with_the_run(tmp_path: Path) -> None:
    """The neighbour stops on request, and removes its file."""
    with noise(tmp_path, wanted=True) as helpers:
        assert len(helpers) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_file_system_has_a_name(tmp_path: Path) -> None:
    """Found in the mount table for any directory."""
    assert file_system_of(tmp_path) != "unknown"
    assert file_system_of(Path("/proc/self")) == "proc"


# --- workloads --------------------------------------------------------------------------------


def test_large_has_216_tensors_of_the_asked_size() -> None:
    """Every byte that is asked for is there, in 216 tensors."""
    workload = make_workload("large", 1_000_000, rank=0, world_size=1)
    assert (len(workload.tensors), workload.nbytes) == (216, 1_000_000)


def test_llama_has_the_real_sizes_of_one_rank_and_scaled_columns() -> None:
    """An eighth of 8.03e9 elements of 14 bytes; less is as many tensors with as many rows."""
    elements = sum(math.prod(shape) for shape in PARAMETERS.values())
    assert elements == 8_030_261_248
    real = sizes_for(elements * ELEMENT_NBYTES // RANKS)
    assert real == {name: (shape[0] // RANKS, *shape[1:]) for name, shape in PARAMETERS.items()}
    assert len(real) == 291
    assert real["model.layers.31.mlp.down_proj.weight"] == (512, 14336)
    workload = make_workload("llama3-8b", 32 << 20, rank=0, world_size=1)
    tensors = dict(tensors_of(workload.state))
    assert 0.8 * (32 << 20) < workload.nbytes <= 32 << 20
    assert len(tensors) == 4 * 291
    model = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    assert {tensor.dtype for tensor in model.values()} == {torch.bfloat16}
    assert sum(tensor.nbytes for tensor in model.values()) == workload.nbytes // 7
    for name, shape in real.items():
        moment = workload.state["optimizer"]["state"][name]["exp_avg"]
        assert moment.dtype == torch.float32
        assert moment.shape[0] == shape[0]


def test_ranks_have_names_of_their_own() -> None:
    """DCP would save equal names once only."""
    names = [
        {name for name, _ in tensors_of(make_workload("many", SMALL, rank=r, world_size=2).state)}
        for r in range(2)
    ]
    assert not names[0] & names[1]


@settings(deadline=None, max_examples=25)  # a promise about bits, not about time
@given(versions=st.lists(st.integers(0, 1000), min_size=1, max_size=5))
def test_a_version_can_be_had_again(versions: list[int]) -> None:
    """The same version has the same bits again, and another differs in every tensor."""
    workload = make_workload("mixed", SMALL, rank=0, world_size=1)
    first = {name: tensor.clone() for name, tensor in tensors_of(workload.state)}
    for version in versions:
        workload.set_version(version)
    workload.set_version(workload.version + 1)
    everything = [name for name, _ in tensors_of(workload.state)]
    workload.set_version(0)
    assert differences(first, dict(tensors_of(workload.state))) == []
    workload.advance()
    assert differences(first, dict(tensors_of(workload.state))) == everything


def test_differences_see_bits_names_and_shapes() -> None:
    """NaN equals NaN, minus zero is not zero, and what is missing or too much counts."""
    nan, zero = torch.tensor([float("nan")]), torch.zeros(2)
    assert differences({"a": nan}, {"a": nan.clone()}) == []
    assert differences({"a": zero}, {"a": -zero}) == ["a"]
    assert differences({"a": zero}, {"a": zero.view(1, 2)}) == ["a"]
    assert differences({"a": zero}, {"b": zero}) == ["a", "b"]


def test_the_transformer_has_the_size_it_says() -> None:
    """The formula that picks the width counts the very bytes of parameters and optimizer state."""
    workload = make_workload("mixed", 2 << 20, rank=0, world_size=1)
    width = width_for(2 << 20)
    assert workload.nbytes == training_nbytes(width) <= 2 << 20
    model, optimizer = train_one_step(2 << 20, seed=1)
    assert len(optimizer.state) == len(list(model.parameters()))


# --- quantities -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("1.5g", 3 << 29),
        ("100 MB", 10**8),
        ("2KiB", 2048),
        ("4TiB", 4 << 40),
        ("1tb", 10**12),
    ],
    ids=str,
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    """Binary and decimal units, fractions, and plain numbers."""
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "1 TiBs", "1e3", "9" * 400], ids=repr)
def test_what_is_no_size_is_refused(text: str) -> None:
    """With a message that shows what to write."""
    with pytest.raises(ValueError, match=r"size|less than"):
        parse_nbytes(text)


@settings(deadline=None)
@given(st.integers(1, 1 << 53))
def test_sizes_are_written_as_they_are_read(nbytes: int) -> None:
    """What is printed reads back within its four digits, without the commas between digits."""
    assert parse_nbytes(format_nbytes(nbytes).replace(",", "")) == pytest.approx(nbytes, rel=1e-3)


def test_spread_is_that_of_the_samples() -> None:
    """Median, ends and quartiles of known samples; none of no samples."""
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert spread is not None
    assert (spread.median, spread.low, spread.high, spread.count) == (3.0, 1.0, 5.0, 5)
    assert spread.quartiles == (2.0, 4.0)
    assert Spread.of([]) is None
    assert median_of([None, 3.0, 1.0]) == 2.0
    assert median_of([None]) is None


def test_growth_leaves_the_first_save_out() -> None:
    """The first save has the preparations in it; growth is from the second one on."""
    assert MemoryFigures(peaks_nbytes=(9, 5, 5, 7)).growth_nbytes == 2
    assert MemoryFigures(peaks_nbytes=(9, 5)).growth_nbytes == 0


def test_patterns_choose_contenders() -> None:
    """In their own order; a pattern that matches none is an error."""
    names = ["nostall", "nostall dcp.save", "dcp.save"]
    assert chosen(names, []) == names
    assert chosen(names, ["dcp.*", "nostall"]) == ["nostall", "dcp.save"]
    with pytest.raises(ValueError, match="matches 'x'"):
        chosen(names, ["nostall", "x"])
