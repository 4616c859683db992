"""``ls``, ``inspect``, ``latest`` and ``diff``: what users learn about checkpoints."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from cli.conftest import Run
from nostall.filesystem_async import FileSystemWriterAsync
from support.parts import save_in_halves
from support.permissions import without_permission
from support.states import read_metadata, save_stock_way, small_state

STORED = Path(__file__).parents[1] / "checkpoints"


def save(path: Path, state: dict[str, Any] | None = None) -> None:
    writer = nostall.FileSystemWriterAsync(path, sync_files=False)
    dcp.save(state or small_state(), storage_writer=writer, no_dist=True)


def at(path: Path, seconds: float) -> None:
    os.utime(path / ".metadata", (seconds, seconds))


def row_of(output: str, name: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.split()[-1:] == [name])
    return line.split()


# --- ls and latest ----------------------------------------------------------------------------


def test_the_list_says_what_is_complete(tmp_path: Path, run: Run) -> None:
    """By nostall or stock; a damaged one, an unfinished save and other directories are told apart.

    The last line is the newest, and ``latest`` prints the newest complete one.
    """
    save_stock_way(tmp_path / "step-100", small_state())
    at(tmp_path / "step-100", 1e9)
    save(tmp_path / "step-200")
    save(tmp_path / "step-300")
    next((tmp_path / "step-300").glob("*.distcp")).write_bytes(b"short")
    (tmp_path / "step-400").mkdir()
    (tmp_path / "step-400" / "__0_0.distcp").write_bytes(b"a part")
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / ".metadata")
    status, shown, _ = run("ls", tmp_path)
    assert status == 0
    assert "unreadable" in row_of(shown, "logs")
    (tmp_path / "logs" / ".metadata").unlink()
    status, shown, _ = run("ls", tmp_path)
    assert "complete" in row_of(shown, "step-100")
    assert "complete" in row_of(shown, "step-200")
    assert row_of(shown, "step-200")[0] == "200"
    assert "damaged" in row_of(shown, "step-300")
    assert "not committed" in " ".join(row_of(shown, "step-400"))
    assert "logs" not in shown
    assert shown.splitlines()[1].endswith("step-100")
    assert run("latest", tmp_path)[:2] == (0, f"{tmp_path / 'step-200'}\n")
    listed = json.loads(run("ls", tmp_path, "--json")[1])
    assert [each["step"] for each in listed] == [100, 200, 300, 400]
    files = [file.stat().st_size for file in (tmp_path / "step-200").iterdir()]
    assert listed[1]["nbytes"] == sum(files)


def test_parts_of_a_step_are_listed(tmp_path: Path, run: Run) -> None:
    """Model and optimizer as two checkpoints in one directory: a line each, and never pruned."""
    for part in ("model", "optimizer"):
        save(tmp_path / "step-1" / part)
    save(tmp_path / "step-2")
    shown = run("ls", tmp_path)[1]
    assert "complete" in row_of(shown, "step-1/model")
    assert "complete" in row_of(shown, "step-1/optimizer")
    assert "nothing to remove" in run("prune", tmp_path, "--keep", "latest=1")[1]


def test_links_to_checkpoints_are_listed(tmp_path: Path, run: Run) -> None:
    """``ls`` shows links with their targets, and ``latest`` prefers a directory to a link to it."""
    save(tmp_path / "elsewhere" / "step-1")
    root = tmp_path / "root"
    save(root / "step-2")
    (root / "pinned").symlink_to("../elsewhere/step-1")
    (root / "newest").symlink_to("step-2")
    for name, target in (("broken", "nothing"), ("logs", "../elsewhere"), ("self", ".")):
        (root / name).symlink_to(target)
    status, shown, _ = run("ls", root)
    assert status == 0
    assert [line.split("  ")[-1].strip() for line in shown.splitlines()[1:]] == [
        "pinned -> ../elsewhere/step-1",
        "newest -> step-2",
        "step-2",
    ]
    listed = json.loads(run("ls", root, "--json")[1])
    assert [each["link"] for each in listed] == ["../elsewhere/step-1", "step-2", None]
    assert run("latest", root)[1] == f"{root / 'step-2'}\n"
    (root / "step-2").rename(tmp_path / "elsewhere" / "step-2")
    assert run("latest", root)[1] == f"{root / 'pinned'}\n"
    assert "pinned" in run("ls", root)[1]


COMMANDS: list[list[str]] = [
    ["ls", "PATH"],
    ["latest", "PATH"],
    ["inspect", "PATH"],
    ["verify", "PATH"],
    ["diff", "PATH", "PATH"],
    ["prune", "PATH", "--keep", "latest=1"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=[command[0] for command in COMMANDS])
def test_nothing_there_is_an_exit_status(tmp_path: Path, run: Run, command: list[str]) -> None:
    """3, and one line on standard error that says what is missing; 2 for a file.

    1 for a broken link, also before the last name: a volume that is not mounted looks like that.
    """
    file, link, empty = tmp_path / "file", tmp_path / "link", tmp_path / "empty"
    file.touch()
    link.symlink_to("nothing")
    empty.mkdir()
    for path, expected, why in (
        (empty, 3, " in it" if command[0] in ("ls", "latest", "prune") else "committed here"),
        (tmp_path / "nowhere", 3, "no such directory"),
        (link, 1, f"the symbolic link {link} is broken"),
        (link / "job" / "checkpoints", 1, f"the symbolic link {link} is broken"),
        (file / "below", 3, "no such directory"),
        (file, 2, "not a directory"),
    ):
        given = [str(path) if word == "PATH" else word for word in command]
        status, shown, error = run(*given)
        assert (status, shown, error.count("\n")) == (expected, "", 1), error
        assert str(path) in error
        assert why in error


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(([word.replace("PATH", "") for word in command], "") for command in COMMANDS),
        (["diff", ".", ""], "B"),
        (["convert", "", "new"], "SOURCE"),
        (["convert", ".", ""], "TARGET"),
    ],
    ids=str,
)
def test_an_empty_path_is_a_wrong_argument(run: Run, command: list[str], name: str) -> None:
    """A script whose variable is not set must not take it for a start from scratch."""
    status, shown, error = run(*command)
    assert (status, shown) == (2, "")
    assert f"argument {name}" in error
    assert error.endswith(": the path is empty; is a variable not set?\n")


def test_a_broken_link_is_not_converted(tmp_path: Path, run: Run) -> None:
    """A link to nothing exits with status 1, like other damage, and the error names the link."""
    link = tmp_path / "link"
    link.symlink_to("nothing")
    status, shown, error = run("convert", link, tmp_path / "new")
    assert (status, shown) == (1, "")
    assert error.startswith(f"nostall: {link}: the symbolic link {link} is broken")


def test_unknown_object_stores_are_wrong_arguments(run: Run) -> None:
    """Not directories without checkpoints."""
    for name, *more in (["ls"], ["verify"], ["inspect"], ["latest"], ["convert", "new"]):
        status, _, error = run(name, "nowhere://bucket/checkpoints", *more)
        assert (status, "nowhere://" in error) == (2, True)


def test_an_address_that_lost_a_slash_is_a_wrong_argument(run: Run) -> None:
    """Not a directory that does not exist."""
    for name, *more in (["ls"], ["prune", "--keep", "latest=1"], ["verify"], ["convert", "new"]):
        status, _, error = run(name, "s3:/bucket/checkpoints", *more)
        assert (status, "slashes is lost" in error) == (2, True)


def test_commands_that_find_nothing_say_where_checkpoints_are(tmp_path: Path, run: Run) -> None:
    """One or two levels too high, the newest first, or the checkpoint instead of its root."""
    for step in (1, 2, 3, 4):
        save(tmp_path / "run" / f"step-{step}")
    newest = tmp_path / "run" / "step-4"
    for command, path, below in (
        ("latest", tmp_path, "run/step-4, run/step-3, run/step-2 and 1 more"),
        ("inspect", tmp_path, "run/step-4, run/step-3, run/step-2 and 1 more"),
        ("inspect", newest.parent, "step-4, step-3, step-2 and 1 more"),
    ):
        status, shown, error = run(command, path)
        assert (status, shown, error.count("\n")) == (3, "", 1)
        assert f"; below it, the newest first: {below}\n" in error
    for command, *more in (["latest"], ["prune", "--keep", "latest=1"]):
        status, shown, error = run(command, newest, *more)
        assert (status, shown) == (2, "")  # not 3, by which a job starts from scratch
        assert "it is a checkpoint itself (pass the directory that holds it)" in error
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "__0_0.distcp").write_bytes(b"half")
    for command in ("latest", "verify", "inspect"):
        status, _, error = run(command, tmp_path / "begun")
        assert status == 3
        assert "it has files of a save that is in progress or was interrupted" in error
    (tmp_path / "begun" / "__0.metadata").touch()
    status, _, error = run("verify", tmp_path / "begun")
    assert (status, "each rank has saved alone here" in error) == (3, True)
    assert run("latest", tmp_path / "begun")[0] == 2


def test_all_checkpoints_of_a_root_are_verified(tmp_path: Path, run: Run) -> None:
    """A line each, also for one in a subdirectory; the exit status is that of the worst."""
    for name in ("step-1", "step-2", "run/step-3"):
        save(tmp_path / name, {"x": torch.ones(100)})
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "__0_0.distcp").write_bytes(b"a save that is in progress")
    status, shown, error = run("verify", tmp_path)
    assert (status, error) == (0, "")
    assert [line.partition(":")[0] for line in shown.splitlines()] == [
        str(tmp_path / name) for name in ("step-1", "step-2", "run/step-3")
    ]
    assert shown.count("whole, as it was written") == 3
    (tmp_path / "step-2" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "pwned")))
    assert run("verify", tmp_path)[0] == 4
    file = tmp_path / "step-1" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, shown, _ = run("verify", tmp_path)
    assert (status, shown.count("\n")) == (1, 3)
    assert f"{tmp_path / 'step-1'}: DAMAGED" in shown
    found = {each["path"]: each for each in json.loads(run("verify", tmp_path, "--json")[1])}
    assert [each["state"] for each in found.values()].count("whole") == 1
    assert found[str(tmp_path / "step-1")]["damages"][0]["file"] == "__0_0.distcp"


def test_metrics_of_a_manager_are_shown(tmp_path: Path, run: Run) -> None:
    """By ``ls`` and ``inspect``; what has none, or cannot be read, has no such column."""
    with nostall.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.zeros(3)}, metrics={"loss": 0.25, "eval:accuracy": 1})
        manager.wait()
        manager.save(2, {"x": torch.zeros(3)})
        manager.wait()
        manager.save(3, {"x": torch.zeros(3)}, metrics={"loss": float("nan")})
        manager.wait()
    first, second, third = (Path(manager.path(step)) for step in (1, 2, 3))
    rows = run("ls", tmp_path)[1].splitlines()
    assert rows[0].split()[-2:] == ["metrics", "name"]
    assert rows[1].split()[-3:] == ["loss=0.25", "eval:accuracy=1", first.name]
    assert rows[2].split()[-2:] == ["complete", second.name]
    metrics = [each["metrics"] for each in json.loads(run("ls", tmp_path, "--json")[1])]
    assert metrics == [{"loss": 0.25, "eval:accuracy": 1.0}, {}, {"loss": None}]
    assert rows[3].split()[-2:] == ["loss=nan", third.name]
    assert run("inspect", first)[1].endswith("; metrics loss=0.25 eval:accuracy=1\n")
    assert "metrics" not in run("inspect", second)[1]
    assert json.loads(run("inspect", first, "--json")[1])["metrics"] == metrics[0]
    for step in (first, third):
        (shard,) = step.glob("*.distcp")
        shard.write_bytes(bytes(shard.stat().st_size))
    assert "loss" not in run("ls", tmp_path)[1]


def test_a_misspelt_name_is_an_error(tmp_path: Path, run: Run) -> None:
    """Not a checkpoint without such items, or without differences; the line has names."""
    save(tmp_path, {"model": {"weight": torch.zeros(2)}})
    for command in (["inspect", tmp_path], ["diff", tmp_path, tmp_path]):
        status, shown, error = run(*command, "--name", "wieght")
        assert (status, shown, error.count("\n")) == (2, "", 1)
        assert "model.weight" in error
        assert run(*command, "--name", "*weight")[2] == ""


def test_an_error_of_the_system_begins_with_its_path(tmp_path: Path, run: Run) -> None:
    """Without number and quotation marks."""
    save(tmp_path / "saved", {"x": torch.zeros(2)})
    with without_permission(tmp_path / "saved" / ".metadata"):
        for command in (["inspect"], ["diff", tmp_path / "saved"]):
            status, _, error = run(*command, tmp_path / "saved")
            assert (status, error) == (
                1,
                f"nostall: {tmp_path / 'saved' / '.metadata'}: Permission denied\n",
            )


def test_a_truncated_file_is_named_before_values_are_read(tmp_path: Path, run: Run) -> None:
    """File and sizes, by each command that shows or reads items; nothing is converted."""
    for name in ("a", "b"):
        save(tmp_path / name, {"x": torch.ones(100)})
    os.truncate(tmp_path / "b" / "__0_0.distcp", 10)
    commands = (
        ["inspect", tmp_path / "b"],
        ["diff", tmp_path / "a", tmp_path / "b"],
        ["diff", "--values", tmp_path / "a", tmp_path / "b"],
        ["convert", tmp_path / "b", tmp_path / "b.pt"],
    )
    for command in commands:
        status, _, error = run(*command)
        assert (status, error.count("\n")) == (1, 1)
        assert "__0_0.distcp: has 10 bytes, expected" in error
        assert "nostall verify" in error
        assert "--trust" not in error
    assert "__0_0" in json.loads(run("inspect", "--json", tmp_path / "b")[1])["damage"]
    assert json.loads(run("inspect", "--json", tmp_path / "a")[1])["damage"] is None
    assert not (tmp_path / "b.pt").exists()


def test_a_job_does_not_start_from_scratch_if_all_checkpoints_are_damaged(
    tmp_path: Path, run: Run
) -> None:
    """By their sizes, or with ``--deep`` by their bytes: 1. After an interrupted save: 3."""
    save(tmp_path / "step-1")
    file = next((tmp_path / "step-1").glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    assert run("latest", tmp_path)[0] == 0
    status, shown, error = run("latest", "--deep", tmp_path)
    assert (status, shown) == (1, "")
    assert f"`nostall verify {tmp_path / 'step-1'}`" in error
    file.write_bytes(b"short")
    assert run("latest", tmp_path)[0] == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "linked").symlink_to(tmp_path / "step-1")
    assert run("latest", tmp_path / "other")[0] == 1
    file.unlink()
    file.mkdir()
    assert run("latest", tmp_path)[0] == 1
    (tmp_path / "step-1" / ".metadata").unlink()
    assert run("latest", tmp_path)[0] == 3


def test_storage_that_does_not_answer_is_not_damage(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the system is shown, and not a verdict on the checkpoint."""
    save(tmp_path, {"x": torch.ones(100)})
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(".distcp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    status, _, error = run("inspect", tmp_path)
    assert (status, error.count("\n")) == (1, 1)
    assert "Input/output error" in error
    assert "is damaged" not in error


def test_errors_begin_with_the_path(tmp_path: Path, run: Run) -> None:
    """And have no phase, which only a save has."""
    save(tmp_path)
    (tmp_path / ".metadata").write_bytes((tmp_path / ".metadata").read_bytes()[:-9])
    status, _, error = run("inspect", tmp_path)
    assert status == 1
    assert error.startswith(f"nostall: {tmp_path / '.metadata'}: ")
    assert "phase=" not in error


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["ls", ".", "--js"], "nostall ls [-h] "),
        (["verify", ".", "--fast", "a", "b"], "nostall verify [-h] "),
        (["--js", "ls", "."], "nostall [-h] "),
    ],
    ids=["ls", "verify", "none"],
)
def test_unknown_options_are_answered_with_the_usage_of_the_command(
    run: Run, arguments: list[str], usage: str
) -> None:
    """And with what was not recognised, as its last line."""
    status, shown, error = run(*arguments)
    assert (status, shown) == (2, "")
    assert error.startswith(f"usage: {usage}")
    unknown = " ".join(word for word in arguments[1:] if word != ".") or arguments[0]
    unknown = arguments[0] if arguments[0].startswith("-") else unknown
    assert error.endswith(f": error: unrecognized arguments: {unknown}\n")


def test_no_command_is_answered_with_help(run: Run) -> None:
    """The list of commands, and the status of wrong arguments."""
    status, shown, error = run()
    assert (status, shown) == (2, "")
    assert "verify" in error


def test_damage_of_many_items_is_a_short_line(tmp_path: Path, run: Run) -> None:
    """Three names and a number; the JSON has all names."""
    save(tmp_path, {f"layer{number}": torch.zeros(100) for number in range(20)})
    next(tmp_path.glob("*.distcp")).write_bytes(b"")
    status, shown, _ = run("verify", tmp_path)
    assert status == 1
    assert "layer0, layer1, layer2 and 17 more)" in shown
    assert "20 items, 1 file, " in shown
    (damage,) = json.loads(run("verify", "--json", tmp_path)[1])["damages"]
    assert len(damage["items"]) == 20


def test_lists_help_and_the_latest_need_no_torch(tmp_path: Path) -> None:
    """They, and a dry run over nostall's checkpoints, are answered at once, metrics included."""
    with nostall.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.zeros(3)}, metrics={"loss": 0.5})
        manager.wait()
    program = f"""
import contextlib, sys
from nostall.cli import main
for arguments in (["--help"], ["prune", "--help"], ["--version"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
for command in (
    "ls", "latest", "inspect", "verify", "prune --keep latest=1", "convert new", "diff other"
):
    name, *more = command.split()
    assert main([name, {str(tmp_path / "none")!r}, *more]) == 3
assert main(["ls", {str(tmp_path)!r}]) == 0
assert main(["latest", {str(tmp_path)!r}]) == 0
assert main(["prune", {str(tmp_path)!r}, "--keep", "latest=1"]) == 0
assert "torch" not in sys.modules
"""
    root = str(Path(nostall.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "exit status" in done.stdout
    assert "loss=0.5" in done.stdout


# --- inspect ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    sorted(path.parent for path in STORED.glob("torch-*/*/.metadata")),
    ids=lambda p: "-".join(p.parts[-2:]),
)
def test_checkpoints_of_every_version_and_writer_can_be_inspected(path: Path, run: Run) -> None:
    """Names, dtypes, shapes and files are in the table and in the JSON."""
    status, shown, _ = run("inspect", path)
    assert status == 0
    (row,) = (line for line in shown.splitlines() if line.startswith("model.weight "))
    assert "float32  [4, 3] " in row
    assert row.endswith(" __0_0.distcp")
    assert "2 tensors, 1 object" in shown
    plain = json.loads(run("inspect", path, "--json")[1])
    weight = next(item for item in plain["items"] if item["name"] == "model.weight")
    assert (weight["dtype"], weight["shape"]) == ("float32", [4, 3])
    assert weight["nbytes"] == weight["parts"][0]["nbytes"] > 48
    assert (plain["nostall"] is None) == (path.name == "stock")


def test_sharding_is_shown(tmp_path: Path, run: Run) -> None:
    """Parts along each dimension, and each part with its place in the JSON."""
    save_in_halves(tmp_path, {"weight": torch.zeros(6, 4), "bias": torch.zeros(4)})
    shown = run("inspect", tmp_path)[1]
    assert next(line for line in shown.splitlines() if "weight" in line).split()[4] == "2x1"
    plain = json.loads(run("inspect", tmp_path, "--json", "--name", "weight")[1])
    (item,) = plain["items"]
    assert [part["offsets"] for part in item["parts"]] == [[0, 0], [3, 0]]


def test_filters_add_up(tmp_path: Path, run: Run) -> None:
    """By name, in the order of the checkpoint or another; the summary says how many are shown."""
    state = {"a": {"x": torch.zeros(1000), "y": torch.zeros(3).double()}, "b": torch.zeros(2)}
    save(tmp_path, state)

    def names(*options: str) -> list[str]:
        plain = json.loads(run("inspect", tmp_path, "--json", *options)[1])
        return [item["name"] for item in plain["items"]]

    def nbytes(name: str) -> int:
        (item,) = json.loads(run("inspect", tmp_path, "--json", "--name", name)[1])["items"]
        return int(item["nbytes"])

    assert names("--name", "a.*") == ["a.x", "a.y"]
    assert names("--name", "b", "--name", "a.x") == ["a.x", "b"]
    assert names("--sort", "size") == sorted(names("--sort", "size"), key=nbytes, reverse=True)
    assert names("--sort", "size")[0] == "a.x"
    assert names("--sort", "name") == ["a.x", "a.y", "b"]
    assert "1 tensor, 0 objects (of 3)" in run("inspect", tmp_path, "--name", "b")[1]


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_metadata_cannot_run_code(tmp_path: Path, run: Run) -> None:
    """Hostile metadata ends every command with status 4, one line, and nothing run."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "pwned")))
    for command in (["inspect"], ["convert", tmp_path / "new"], ["diff", tmp_path]):
        status, _, error = run(command[0], tmp_path, *command[1:])
        assert status == 4
        assert error.count("\n") == 1
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("lie", ["size", "properties"])
def test_metadata_that_lies_is_refused_in_one_line(tmp_path: Path, run: Run, lie: str) -> None:
    """A tensor of a tebibyte in a file of a kilobyte, or one without a dtype: no traceback."""
    save_stock_way(tmp_path / "a", {"x": torch.zeros(3)})
    metadata = read_metadata(tmp_path / "a")
    tensor: Any = metadata.state_dict_metadata["x"]
    if lie == "size":
        tensor.size = tensor.chunks[0].sizes = torch.Size([1 << 50])
    else:
        del tensor.properties
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    for command in (["diff", "--values", tmp_path / "a"], ["convert", tmp_path / "new"]):
        status, _, error = run(command[0], tmp_path / "a", *command[1:])
        assert (status, error.count("\n")) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# --- diff -------------------------------------------------------------------------------------


def test_equal_checkpoints_do_not_differ(tmp_path: Path, run: Run) -> None:
    """Whoever wrote them, in however many parts: every bit is compared."""
    save(tmp_path / "a")
    save_in_halves(tmp_path / "b", small_state())
    assert run("diff", tmp_path / "a", tmp_path / "b")[0] == 0
    status, shown, _ = run("diff", "--values", tmp_path / "a", tmp_path / "b")
    assert (status, shown.splitlines()[-1].rsplit(" ", 2)[-2:]) == (0, ["0", "differ"])
    assert "--values" not in shown
    assert "values were not compared" in run("diff", tmp_path / "a", tmp_path / "b")[1]


def test_each_difference_is_named(tmp_path: Path, run: Run) -> None:
    """Each name on one side only, each changed dtype or shape, and how far values differ."""
    values = torch.zeros(1000, 3)
    save(tmp_path / "a", {"v": values, "w": torch.zeros(2), "gone": torch.zeros(1), "n": {"k": 1}})
    changed = values.clone()
    changed[7, 1], changed[999, 2] = 0.5, -2.0
    new = torch.zeros(2).double()
    save(tmp_path / "b", {"v": changed, "w": new, "new": torch.zeros(1), "n": {"k": 2}})
    status, shown, _ = run("diff", tmp_path / "a", tmp_path / "b", "--values")
    assert status == 1
    lines = shown.splitlines()
    assert "- gone: float32 [1]" in lines
    assert "+ new: float32 [1]" in lines
    assert "! w: float32 [2] -> float64 [2]" in lines
    assert "~ v: 2 of 3000 elements differ, at most by 2" in lines
    assert "~ n.k: the stored objects have other bytes" in lines
    assert run("diff", tmp_path / "a", tmp_path / "b", "--values", "--name", "x*")[0] == 2
    plain = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert {each["name"] for each in plain} == {"gone", "new", "w"}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            torch.tensor([0.0, 1.0]),
            torch.tensor([-0.0, 1.0]),
            "1 of 2 elements differ, at most by 0",
        ),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), "1 of 1 elements differ"),
        (torch.tensor(3), torch.tensor(5), "1 of 1 elements differ, at most by 2"),
        (torch.tensor([True]), torch.tensor([False]), "1 of 1 elements differ, at most by 1"),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 4j]), "1 of 1 elements differ, at most by 3"),
        (torch.ones(2).to(torch.float8_e5m2), torch.ones(2).to(torch.float8_e5m2), None),
        (torch.full((2,), torch.nan), torch.full((2,), torch.nan), None),
        (torch.zeros(0, 3), torch.zeros(0, 3), None),
    ],
    ids=["zeros", "nan", "integers", "bool", "complex", "float8", "equal nan", "empty"],
)
def test_values_are_compared_by_bits(
    tmp_path: Path, run: Run, one: torch.Tensor, other: torch.Tensor, said: str | None
) -> None:
    """Values of any dtype differ if a bit does; the distance is given where it is finite."""
    save(tmp_path / "a", {"x": one})
    save(tmp_path / "b", {"x": other})
    status, shown, _ = run("diff", "--values", tmp_path / "a", tmp_path / "b")
    assert status == (1 if said else 0)
    assert said is None or shown.splitlines()[0] == f"~ x: {said}"


def test_a_truncated_file_is_named_without_reading_the_others(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of large checkpoints take hours; sizes take milliseconds."""
    writer = FileSystemWriterAsync(tmp_path / "a", thread_count=2)
    dcp.save({"x": torch.ones(4), "y": torch.ones(4)}, storage_writer=writer)
    os.truncate(tmp_path / "a" / "__0_1.distcp", 100)
    read: list[int] = []

    @contextmanager
    def progress(_what: str) -> Iterator[Any]:
        yield lambda done, _total: read.append(done)

    monkeypatch.setattr("nostall._cli.items.progress", progress)
    for command in (["diff", "--values", tmp_path / "a"], ["convert"]):
        other = [tmp_path / "b"] if command == ["convert"] else []
        status, _, error = run(*command, tmp_path / "a", *other)
        assert (status, read) == (1, [])
        assert "the checkpoint is damaged: __0_1.distcp" in error


def test_a_comparison_of_values_shows_its_progress(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All items count, also one that only one checkpoint has; it ends with all bytes."""
    save(tmp_path / "a", {"a": torch.ones(4), "only": torch.ones(4), "z": torch.ones(4)})
    save(tmp_path / "b", {"a": torch.ones(4), "z": torch.ones(4)})
    shown: list[tuple[int, int]] = []

    @contextmanager
    def progress(what: str) -> Iterator[Any]:
        yield lambda done, total: shown.append((done, total)) if what == "comparing" else None

    monkeypatch.setattr("nostall._cli.items.progress", progress)
    assert run("diff", "--values", tmp_path / "a", tmp_path / "b")[0] == 1
    (first, total), (last, same) = shown
    assert 0 < first < last == total == same


def test_damage_is_not_a_difference(tmp_path: Path, run: Run) -> None:
    """A flipped bit is an error before values are compared, or converted under new checksums."""
    for name in ("a", "b"):
        save(tmp_path / name, {"x": torch.ones(100)})
    file = next((tmp_path / "b").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[content.index(b"\0\0\x80\x3f" * 100) + 200] ^= 1
    file.write_bytes(content)
    for command in (["diff", "--values", tmp_path / "a"], ["convert"]):
        status, shown, error = run(
            *command, tmp_path / "b", *([tmp_path / "c"] * (len(command) < 2))
        )
        assert (status, shown, error.count("\n")) == (1, "", 1)
        assert "the checkpoint is damaged: __0_0.distcp: CRC-32 is" in error
    assert not (tmp_path / "c").exists()
