"""Output to a terminal and to a pipe, and the format of errors."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from cli.conftest import Run
from nostall._cli.output import format_age, format_size, progress, table
from nostall.cli import main

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(nostall.__file__).parents[1]),
    "TERM": "xterm",
    "COLUMNS": "100",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    writer = nostall.FileSystemWriterAsync(tmp_path / "step-1", sync_files=False)
    dcp.save({"weight": torch.zeros(30, 40)}, storage_writer=writer, no_dist=True)
    return tmp_path / "step-1"


def test_a_table_has_columns() -> None:
    """Under their headings, numbers aligned right; without rows there is none."""
    assert table(">size name", [("1 B", "x")]) == ["size  name", " 1 B  x"]
    assert table("name", []) == []


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a line that is wiped in the end."""
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=is_terminal: shown)
        with progress("reading") as report:
            report(30, 120)
        printed = capsys.readouterr()
        assert printed.out == ""
        assert ("reading  25%, 30 B of 120 B" in printed.err) == is_terminal
        assert printed.err.endswith("\r\033[K") == is_terminal


def test_progress_on_a_real_terminal(
    checkpoint: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``verify`` shows it, and leaves nothing of it behind; in a pipe there are findings only."""
    main_end, terminal = pty.openpty()
    try:
        with open(terminal, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            assert run("verify", checkpoint)[0] == 0
        shown = os.read(main_end, 1 << 16)
    finally:
        os.close(main_end)
    assert b"%" in shown or b"verifying" in shown
    assert b"\x1b[" in shown  # wiped
    status, found, error = run("verify", checkpoint)
    assert (status, found.count("\n"), error) == (0, 1, "")


def test_a_reader_that_ends_early_is_no_error(checkpoint: Path) -> None:
    """A command whose pipe is closed early, by ``| head -1``, exits with 141 and no traceback."""
    program = f"""
import sys
from nostall.cli import main
sys.stdin.read()
sys.exit(main(["ls", {str(checkpoint.parent)!r}]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, error = process.communicate(timeout=100)
    assert (process.returncode, error) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((), 2),
        (("fly",), 2),
        (("inspect",), 2),
        (("prune", "."), 2),
        (("inspect", ".", "--sort", "colour"), 2),
        (("inspect", "nowhere://bucket/step-1"), 2),
        (("inspect", "nowhere"), 3),
        (("verify", "nowhere"), 3),
        (("prune", "nowhere", "--keep", "latest=1"), 3),
        (("prune", "nowhere", "--keep", "latest=1", "--del"), 2),
        (("--vers",), 2),
        (("--version",), 0),
        (("ls", "nowhere", "--js"), 2),
    ],
    ids=str,
)
def test_exit_statuses(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    status: int,
) -> None:
    """2 for wrong arguments, abbreviated options among them; 3 for what is not there."""
    monkeypatch.chdir(tmp_path)
    assert run(*arguments)[0] == status


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_no_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """A stream closed by ``>&-`` gets no output, and the exit status does not change."""
    monkeypatch.setattr(sys, stream, None)
    assert main(["ls", str(checkpoint.parent)]) == 0
    assert main(["verify", str(checkpoint)]) == 0
    assert main(["ls", str(checkpoint.parent / "nowhere")]) == 3


def test_a_name_that_cannot_be_printed_is_one_line(checkpoint: Path) -> None:
    """A path that is no text: ``latest`` gives a script no other one, others show it escaped."""
    odd = os.fsencode(checkpoint.parent) + b"/root-\xff"
    os.mkdir(odd)
    os.rename(checkpoint, odd + b"/step-1")
    ended = []
    for name, path in (("latest", odd), ("verify", odd + b"/step-1")):
        done = subprocess.run(
            [sys.executable, "-m", "nostall", name, path],
            env={**ENVIRONMENT, "PYTHONIOENCODING": "utf-8:strict"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        ended.append((done.returncode, done.stdout, done.stderr))
    (status, shown, error), verified = ended
    assert (status, shown, error.count("\n")) == (1, "", 1)
    assert "cannot be printed" in error
    assert (verified[0], "\\udcff" in verified[1], verified[2]) == (0, True, "")


def test_interrupts_end_with_one_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C is no traceback."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nostall._cli.listing.latest_complete", interrupted)
    assert run("latest", tmp_path) == (130, "", "nostall: interrupted\n")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5673, "5.5 KiB"),
        (525_823, "513.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_sizes_have_the_same_digits(nbytes: int, text: str) -> None:
    """One behind the point, so that a column of them can be read."""
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h")],
)
def test_ages_are_short(seconds: float, text: str) -> None:
    """In the largest unit that leaves two of it; a clock that is behind shows nothing odd."""
    assert format_age(seconds) == text


@pytest.mark.parametrize(
    "command", ["ls", "latest", "inspect", "verify", "diff", "prune", "convert"]
)
def test_names_cannot_control_the_terminal(tmp_path: Path, run: Run, command: str) -> None:
    """Control characters in the name of a directory are shown escaped; JSON has the name itself."""
    odd = tmp_path / "\x1b[2J"
    writer = nostall.FileSystemWriterAsync(odd / "step-1", sync_files=False)
    dcp.save({"\x1b[2Jx\nsafe": torch.zeros(1)}, storage_writer=writer, no_dist=True)
    arguments: dict[str, list[object]] = {
        "ls": [tmp_path],
        "latest": [odd],
        "inspect": [odd / "step-1"],
        "verify": [odd],
        "diff": [odd / "step-1", odd / "step-1", "--name", "no such name"],
        "prune": [tmp_path, "--keep", "latest=1"],
        "convert": [odd / "step-1", odd / "step-1.pt"],
    }
    status, shown, error = run(command, *arguments[command])
    assert "\x1b" not in shown + error
    assert "\\x1b[2J" in shown + error
    assert status == (2 if command == "diff" else 0)
    (odd / "step-1.pt").unlink(missing_ok=True)
    if command != "diff":
        printed = run(command, *arguments[command], "--json")[1]
        assert "\x1b" not in printed
        assert "\x1b[2J" in json.dumps(json.loads(printed), ensure_ascii=False).replace(
            "\\u001b", "\x1b"
        )


def test_the_version_is_shown(run: Run) -> None:
    """With the name of the program, and nothing else."""
    assert run("--version") == (0, f"nostall {nostall.__version__}\n", "")
