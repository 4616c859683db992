"""Ten defects planted in copies of the source, and the tests that have to find them.

    python tests/stress/planted.py [NAME ...]

For each defect the named tests run against a copy of ``src`` with one text replaced. A defect that
they do not find, or whose place is no longer there exactly once, makes the exit status 1. The tests
run against an unchanged copy first, where all have to pass.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.processes import ended

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900


class Defect(NamedTuple):
    """One text of the source, what it is replaced with, and the tests that find that."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DEFECTS = {
    "a directory is not synced": Defect(
        "_storage/posix.py",
        """    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
""",
        """    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        pass
""",
        ("tests/end_to_end/test_crash_consistency.py",),
    ),
    "shard files are not synced": Defect(
        "_storage/posix.py",
        "        if self._sync:\n            os.fsync(self._fd)\n",
        "        if not self._sync:\n            os.fsync(self._fd)\n",
        ("tests/end_to_end/test_crash_consistency.py",),
    ),
    "a failed rank does not stop the commit": Defect(
        "_commit/commit.py",
        "    return {rank: each for rank, each in enumerate(outcomes) if isinstance(each, tuple)}",
        "    return {}",
        ("tests/commit/test_collect.py", "tests/queue/test_queue.py"),
    ),
    "a leased block is leased again": Defect(
        "_memory/arena.py",
        "        self._free.remove(block)\n        return block\n",
        "        return block\n",
        ("tests/memory/test_arena.py",),
    ),
    "a payload in several chunks is not sealed": Defect(
        "_writer/files.py",
        "        self._payloads.seal_ending_in(window, chunk)\n",
        "",
        ("tests/save/test_ring.py",),
    ),
    "a request stays scheduled when it is finalised": Defect(
        "core.py",
        "        is_ours = self._caller.take_over(call)\n",
        "        is_ours = True\n",
        ("tests/queue/test_queue.py",),
    ),
    "a tensor is not copied": Defect(
        "_memory/copying.py",
        "            if all(map(_on_cpu, sources)):\n"
        "                self._fill_from_cpu(sources, method)\n",
        "            if all(map(_on_cpu, sources)):\n",
        ("tests/memory/test_isolation.py",),
    ),
    "replaced files are removed before the commit": Defect(
        "_commit/commit.py",
        '        at("commit")\n',
        '        at("commit")\n        storage.remove(list(replaced_files))\n',
        ("tests/commit/test_commit.py", "tests/end_to_end/test_crash_consistency.py"),
    ),
    "any name may be loaded from metadata": Defect(
        "_commit/metadata_pickle.py",
        '            _refuse(f"the name {module:.80}.{name:.80}", _ALLOW_HINT)\n',
        "            return super().find_class(module, name)\n",
        ("tests/commit/test_hostile.py", "tests/read/test_filesystem_reader.py"),
    ),
    "the newest step is removed": Defect(
        "_manager/policies.py",
        "    wanted = {*steps[-1:], *own[-1:]}\n",
        "    wanted = {*own[-1:]}\n",
        ("tests/manager/test_manager_policies.py",),
    ),
}


def main(names: list[str]) -> int:
    """Plant the named defects, or all; the number of those not found, at most 1."""
    chosen = {name: DEFECTS[name] for name in names or DEFECTS}
    tests = sorted({test for defect in chosen.values() for test in defect.tests})
    with TemporaryDirectory() as directory:
        passed, last = run(Path(directory), tests)
    print(f"unchanged: {last}", flush=True)
    unknown = [name for name, defect in chosen.items() if not found(name, defect)]
    if unknown:
        print(f"not found: {unknown}")
    return int(bool(unknown) or not passed)


def found(name: str, defect: Defect) -> bool:
    with TemporaryDirectory() as directory:
        copy_of_source(Path(directory))
        file = Path(directory) / "src" / "nostall" / defect.file
        text = file.read_text(encoding="utf-8")
        if text.count(defect.old) != 1:
            print(f"{name}: its place is not in {defect.file} exactly once", flush=True)
            return False
        file.write_text(text.replace(defect.old, defect.new), encoding="utf-8")
        passed, last = run(Path(directory), defect.tests, "--exitfirst")
    print(f"{name}: {'NOT FOUND' if passed else last}", flush=True)
    return not passed


def copy_of_source(directory: Path) -> None:
    """Copy ``src``, once."""
    if not (directory / "src").exists():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src", directory / "src", ignore=ignored)


def run(directory: Path, tests: list[str] | tuple[str, ...], *options: str) -> tuple[bool, str]:
    """Whether tests pass against the copy in a directory, and the first failure or the summary."""
    copy_of_source(directory)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *options, *tests]
    environment = {"PYTHONPATH": str(directory / "src")}
    try:
        done = ended(*command, cwd=ROOT, timeout_s=TIMEOUT_S, check=False, environment=environment)
    except subprocess.TimeoutExpired:
        return False, "found by a test that does not end"
    failed = re.search(r"^(?:FAILED|ERROR) \S+", done.stdout, re.MULTILINE)
    last = done.stdout.rstrip().splitlines()[-1] if done.stdout else done.stderr[-200:]
    return done.returncode == 0, failed[0] if failed else last


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
