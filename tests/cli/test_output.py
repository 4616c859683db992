"""Output to a terminal and to a pipe, and the format of errors."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import nostall
from cli.conftest import Run
from nostall._cli.output import format_age, format_size, progress
from nostall.cli import main
from support.processes import ended
from support.states import save_now

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(nostall.__file__).parents[1]),
    "TERM": "xterm",
    "COLUMNS": "100",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_now(tmp_path / "step-1", {"weight": torch.zeros(30, 40)}, sync_files=False)
    return tmp_path / "step-1"


def test_progress_is_shown_on_a_terminal_only(
    checkpoint: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``verify`` shows it, and wipes it in the end; in a pipe there are findings only."""
    main_end, terminal = pty.openpty()
    output = b""
    try:
        with open(terminal, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            assert run("verify", checkpoint)[0] == 0
            with progress("reading") as report:
                report(30, 120)
        with suppress(OSError):  # the terminal is closed, and all that it had was read
            while part := os.read(main_end, 1 << 16):
                output += part
    finally:
        os.close(main_end)
    shown = output.decode()
    assert "verifying" in shown
    assert "reading  25%, 30 B of 120 B" in shown
    assert shown.endswith("\r\033[K")
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
    ("arguments", "status", "said"),
    [
        ("", 2, "verify"),
        ("fly", 2, "usage: nostall "),
        ("inspect", 2, "usage: nostall inspect "),
        ("prune .", 2, "usage: nostall prune "),
        ("inspect . --sort colour", 2, "usage: nostall inspect "),
        ("inspect nowhere", 3, "nowhere: no such directory"),
        ("prune nowhere --keep latest=1", 3, "nowhere: no such directory"),
        ("prune nowhere --keep latest=1 --del", 2, "error: unrecognized arguments: --del\n"),
        ("ls . --js", 2, "usage: nostall ls [-h] "),
        ("verify . --fast a b", 2, "error: unrecognized arguments: --fast a b\n"),
        ("--js ls .", 2, "usage: nostall [-h] "),
        ("--vers", 2, "usage: nostall "),
    ],
)
def test_exit_statuses(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    status: int,
    said: str,
) -> None:
    """2 for wrong arguments, also abbreviated ones, with the usage; 3 for what is not there."""
    monkeypatch.chdir(tmp_path)
    ended, shown, error = run(*arguments.split())
    assert (ended, shown) == (status, "")
    assert said in error


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
    strict = {**ENVIRONMENT, "PYTHONIOENCODING": "utf-8:strict"}
    latest, verified = (
        ended(sys.executable, "-m", "nostall", name, path, check=False, environment=strict)
        for name, path in (("latest", odd), ("verify", odd + b"/step-1"))
    )
    assert (latest.returncode, latest.stdout, latest.stderr.count("\n")) == (1, "", 1)
    assert "cannot be printed" in latest.stderr
    assert (verified.returncode, "\\udcff" in verified.stdout, verified.stderr) == (0, True, "")


def test_interrupts_end_with_one_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C is no traceback."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nostall._cli.listing.latest_complete", interrupted)
    assert run("latest", tmp_path) == (130, "", "nostall: interrupted\n")


def test_sizes_and_ages_are_short() -> None:
    """One digit behind the point; ages in a unit that leaves two of it, or a clock is behind."""
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 525_823: "513.5 KiB", 5 << 40: "5.0 TiB"}
    assert {nbytes: format_size(nbytes) for nbytes in sizes} == sizes
    ages = {-5: "0 s", 119: "119 s", 120: "2 min", 7199: "120 min", 7200: "2 h"}
    assert {seconds: format_age(seconds) for seconds in ages} == ages


@pytest.mark.parametrize(
    "command",
    [
        *("ls ROOT", "latest ODD", "inspect STEP", "verify ODD", "convert STEP STEP.pt"),
        *("diff STEP STEP --name other", "prune ROOT --keep latest=1"),
    ],
)
def test_names_cannot_control_the_terminal(tmp_path: Path, run: Run, command: str) -> None:
    """Control characters in the name of a directory are shown escaped; JSON has the name itself."""
    odd = tmp_path / "\x1b[2J"
    save_now(odd / "step-1", {"\x1b[2Jx\nsafe": torch.zeros(1)}, sync_files=False)
    command = command.replace("ROOT", str(tmp_path)).replace("STEP", "ODD/step-1")
    arguments = command.replace("ODD", str(odd)).split()
    status, shown, error = run(*arguments)
    assert "\x1b" not in shown + error
    assert "\\x1b[2J" in shown + error
    assert status == (2 if command.startswith("diff") else 0)
    (odd / "step-1.pt").unlink(missing_ok=True)
    if status == 0:
        printed = run(*arguments, "--json")[1]
        assert "\x1b" not in printed
        assert "\x1b[2J" in str(json.loads(printed)).replace("\\x1b", "\x1b")


def test_the_version_is_shown(run: Run) -> None:
    """With the name of the program, and nothing else."""
    assert run("--version") == (0, f"nostall {nostall.__version__}\n", "")
