"""``ls``, ``inspect``, ``latest`` and ``diff``: what users learn about checkpoints."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import nostall
from cli.conftest import Run
from support.parts import save_in_halves
from support.permissions import without_permission
from support.processes import ended
from support.reads import flipped
from support.states import read_metadata, save_now, save_stock_way, small_state

STORED = Path(__file__).parents[1] / "checkpoints"


def save(path: Path, state: dict[str, Any] | None = None) -> None:
    save_now(path, state or small_state(), sync_files=False)


def row_of(output: str, name: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.split()[-1:] == [name])
    return line.split()


def progress_shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Will have what commands read items for, with the bytes that are done, and all."""
    shown: list[tuple[str, int, int]] = []

    @contextmanager
    def progress(what: str) -> Iterator[Any]:
        yield lambda done, total: shown.append((what, done, total))

    monkeypatch.setattr("nostall._cli.items.progress", progress)
    return shown


# --- ls and latest ----------------------------------------------------------------------------


def test_the_list_says_what_is_complete(tmp_path: Path, run: Run) -> None:
    """Damaged and unfinished ones are told apart, also one level deeper; the newest is last."""
    save_stock_way(tmp_path / "step-100", small_state())
    os.utime(tmp_path / "step-100" / ".metadata", (1e9, 1e9))
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
    save(tmp_path / "logs" / "part")
    status, shown, _ = run("ls", tmp_path)
    assert "complete" in row_of(shown, "step-100")
    assert "complete" in row_of(shown, "step-200")
    assert row_of(shown, "step-200")[0] == "200"
    assert "damaged" in row_of(shown, "step-300")
    assert "not committed" in " ".join(row_of(shown, "step-400"))
    assert "complete" in row_of(shown, "logs/part")
    assert shown.splitlines()[1].endswith("step-100")
    assert run("latest", tmp_path)[:2] == (0, f"{tmp_path / 'step-200'}\n")
    listed = json.loads(run("ls", tmp_path, "--json")[1])
    assert [each["step"] for each in listed] == [100, 200, 300, 400, None]
    files = [file.stat().st_size for file in (tmp_path / "step-200").iterdir()]
    assert listed[1]["nbytes"] == sum(files)


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


COMMANDS = [
    "ls PATH",
    "latest PATH",
    "inspect PATH",
    "verify PATH",
    "diff PATH PATH",
    "prune PATH --keep latest=1",
    "convert PATH new",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_there_is_an_exit_status(tmp_path: Path, run: Run, command: str) -> None:
    """3 if it is missing, 2 for a file, 1 for a broken link: as of a volume that is not mounted."""
    file, link, empty = tmp_path / "file", tmp_path / "link", tmp_path / "empty"
    file.touch()
    link.symlink_to("nothing")
    empty.mkdir()
    is_of_root = command.startswith(("ls", "latest", "prune"))
    for path, expected, why in (
        (empty, 3, " in it" if is_of_root else "committed here"),
        (tmp_path / "nowhere", 3, "no such"),
        (link, 1, f"the symbolic link {link} is broken"),
        (link / "job" / "checkpoints", 1, f"the symbolic link {link} is broken"),
        (file / "below", 3, "no such"),
        (file, *((1, "not a file") if command.startswith("convert") else (2, "not a directory"))),
    ):
        status, shown, error = run(*command.replace("PATH", str(path)).split())
        assert (status, shown, error.count("\n")) == (expected, "", 1), error
        assert str(path) in error
        assert why in error


@pytest.mark.parametrize("command", [*COMMANDS, "diff . PATH", "convert . PATH"])
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", ": the path is empty; is a variable not set?\n"),
        ("nowhere://bucket/checkpoints", "nowhere://"),
        ("s3:/bucket/checkpoints", "slashes is lost"),
    ],
    ids=["empty", "unknown store", "lost slash"],
)
def test_what_is_no_path_is_a_wrong_argument(run: Run, command: str, path: str, why: str) -> None:
    """A script must not take it for a directory without checkpoints, and start from scratch."""
    status, shown, error = run(*[path if each == "PATH" else each for each in command.split()])
    assert (status, shown) == (2, "")
    names = {"diff . PATH": "B", "convert PATH new": "SOURCE", "convert . PATH": "TARGET"}
    assert f"argument {names.get(command, '')}" in error
    assert why in error


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
        assert f"; checkpoints below it, newest first: {below}\n" in error
    for command, *more in (["latest"], ["prune", "--keep", "latest=1"]):
        status, shown, error = run(command, newest, *more)
        assert (status, shown) == (2, "")  # not 3, by which a job starts from scratch
        assert "this is a checkpoint itself (pass the directory that holds it)" in error
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
    with flipped(file, file.stat().st_size // 2):
        status, shown, _ = run("verify", tmp_path)
        listed = json.loads(run("verify", tmp_path, "--json")[1])
    assert (status, shown.count("\n")) == (1, 3)
    assert f"{tmp_path / 'step-1'}: DAMAGED" in shown
    found = {each["path"]: each for each in listed}
    assert [each["state"] for each in found.values()].count("whole") == 1
    assert found[str(tmp_path / "step-1")]["damages"][0]["file"] == "__0_0.distcp"


def test_metrics_of_a_manager_are_shown(tmp_path: Path, run: Run) -> None:
    """By ``ls`` and ``inspect``; what has none, or cannot be read, has no such column."""
    given: list[dict[str, float]] = [{"loss": 0.25, "eval:accuracy": 1}, {}, {"loss": math.nan}]
    with nostall.CheckpointManager(tmp_path) as manager:
        for step, metrics in enumerate(given):
            manager.save(step, {"x": torch.zeros(3)}, metrics=metrics).result()
    first, second, third = (Path(manager.path(step)) for step in range(3))
    rows = [line.split() for line in run("ls", tmp_path)[1].splitlines()]
    assert rows[0][-2:] == ["metrics", "name"]
    assert rows[1][-3:] == ["loss=0.25", "eval:accuracy=1", first.name]
    assert rows[2][-2:] == ["complete", second.name]
    assert rows[3][-2:] == ["loss=nan", third.name]
    listed = [each["metrics"] for each in json.loads(run("ls", tmp_path, "--json")[1])]
    assert listed == [{"loss": 0.25, "eval:accuracy": 1.0}, {}, {"loss": None}]
    assert run("inspect", first)[1].endswith("; metrics loss=0.25 eval:accuracy=1\n")
    assert "metrics" not in run("inspect", second)[1]
    assert json.loads(run("inspect", first, "--json")[1])["metrics"] == listed[0]
    for path in (first, third):
        (shard,) = path.glob("*.distcp")
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


def test_errors_begin_with_the_path(tmp_path: Path, run: Run) -> None:
    """Without number and quotation marks of the system's, nor the phase, which only a save has."""
    save(tmp_path, {"x": torch.zeros(2)})
    metadata = tmp_path / ".metadata"
    for command in (["inspect"], ["diff", tmp_path]):
        with without_permission(metadata):
            status, _, error = run(*command, tmp_path)
        assert (status, error) == (1, f"nostall: {metadata}: Permission denied\n")
    metadata.write_bytes(metadata.read_bytes()[:-9])
    status, _, error = run("inspect", tmp_path)
    assert (status, error.startswith(f"nostall: {metadata}: ")) == (1, True)
    assert "phase=" not in error


def test_a_truncated_file_is_named_before_bytes_are_read(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its sizes, by each command: reading a large checkpoint takes hours."""
    for name in ("a", "b"):
        save_now(tmp_path / name, {"x": torch.ones(9), "y": torch.ones(9)}, thread_count=2)
    os.truncate(tmp_path / "b" / "__0_1.distcp", 10)
    read = progress_shown(monkeypatch)
    for command in (
        ["inspect", tmp_path / "b"],
        ["diff", tmp_path / "a", tmp_path / "b"],
        ["diff", "--values", tmp_path / "b", tmp_path / "a"],
        ["convert", tmp_path / "b", tmp_path / "b.pt"],
    ):
        status, _, error = run(*command)
        assert (status, error.count("\n"), read) == (1, 1, [])
        assert "the checkpoint is damaged: __0_1.distcp: has 10 bytes, expected" in error
        assert "nostall verify" in error
        assert "--trust" not in error
    assert "__0_1" in json.loads(run("inspect", "--json", tmp_path / "b")[1])["damage"]
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
for command in {COMMANDS!r}:
    assert main(command.replace("PATH", {str(tmp_path / "none")!r}).split()) == 3
for command in ("ls PATH", "latest PATH", "prune PATH --keep latest=1"):
    assert main(command.replace("PATH", {str(tmp_path)!r}).split()) == 0
assert "torch" not in sys.modules
"""
    root = str(Path(nostall.__file__).parents[1])
    done = ended(sys.executable, "-c", program, environment={"PYTHONPATH": root})
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

    def items(*options: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]]
        found = json.loads(run("inspect", tmp_path, "--json", *options)[1])["items"]
        return found

    def names(*options: str) -> list[str]:
        return [each["name"] for each in items(*options)]

    assert names("--name", "a.*") == ["a.x", "a.y"]
    assert names("--name", "b", "--name", "a.x") == ["a.x", "b"]
    sizes = [each["nbytes"] for each in items("--sort", "size")]
    assert sizes == sorted(sizes, reverse=True)
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
    for command, *more in (["inspect"], ["convert", tmp_path / "new"], ["diff", tmp_path]):
        status, _, error = run(command, tmp_path, *more)
        assert (status, error.count("\n")) == (4, 1)
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
    for command, *more in (["diff", "--values", tmp_path / "a"], ["convert", tmp_path / "new"]):
        status, _, error = run(command, tmp_path / "a", *more)
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
    assert "~ n.k: the stored bytes differ" in lines
    assert run("diff", tmp_path / "a", tmp_path / "b", "--values", "--name", "x*")[0] == 2
    plain = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert {each["name"] for each in plain} == {"gone", "new", "w"}


def test_values_are_compared_by_bits(tmp_path: Path, run: Run) -> None:
    """Values of any dtype differ if a bit does; the distance is given where it is finite."""
    ones, nans, none = torch.ones(2).to(torch.float8_e5m2), torch.tensor([math.nan]), torch.zeros(0)
    pairs = {
        "zeros": (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        "nan": (torch.tensor([1.0]), nans),
        "integers": (torch.tensor(3), torch.tensor(5)),
        "bool": (torch.tensor([True]), torch.tensor([False])),
        "complex": (torch.tensor([1 + 1j]), torch.tensor([1 + 4j])),
        "float8": (ones, ones),
        "equal nan": (nans, nans),
        "empty": (none, none),
    }
    for number, name in enumerate("ab"):
        save(tmp_path / name, {key: pair[number] for key, pair in pairs.items()})
    status, shown, _ = run("diff", "--values", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert shown.splitlines()[:-1] == [
        "~ zeros: 1 of 2 elements differ, at most by 0",
        "~ nan: 1 of 1 elements differ",
        "~ integers: 1 of 1 elements differ, at most by 2",
        "~ bool: 1 of 1 elements differ, at most by 1",
        "~ complex: 1 of 1 elements differ, at most by 3",
    ]


def test_a_comparison_of_values_shows_its_progress(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All items count, also one that only one checkpoint has; it ends with all bytes."""
    save(tmp_path / "a", {"a": torch.ones(4), "only": torch.ones(4), "z": torch.ones(4)})
    save(tmp_path / "b", {"a": torch.ones(4), "z": torch.ones(4)})
    shown = progress_shown(monkeypatch)
    assert run("diff", "--values", tmp_path / "a", tmp_path / "b")[0] == 1
    (first, total), (last, same) = (each for what, *each in shown if what == "comparing")
    assert 0 < first < last == total == same


def test_damage_is_not_a_difference(tmp_path: Path, run: Run) -> None:
    """A flipped bit is an error before values are compared, or converted under new checksums."""
    for name in ("a", "b"):
        save(tmp_path / name, {"x": torch.ones(100)})
    file = next((tmp_path / "b").glob("*.distcp"))
    with flipped(file, file.read_bytes().index(b"\0\0\x80\x3f" * 100) + 200):
        for command, *paths in (("diff --values", "a", "b"), ("convert", "b", "c")):
            status, shown, error = run(*command.split(), *(tmp_path / each for each in paths))
            assert (status, shown, error.count("\n")) == (1, "", 1)
            assert "the checkpoint is damaged: __0_0.distcp: CRC-32 is" in error
    assert not (tmp_path / "c").exists()
