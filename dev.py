"""Run the checks with nothing installed but Python: `python3 dev.py demo`, `python3 dev.py tests`.

Makes .venv-dev/ with nox in it once, again when constraints.txt changes, and hands over to nox. Standard library only.
"""

from __future__ import annotations  # also lets a Python that is too old get as far as saying so

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv-dev"
CONSTRAINTS = ROOT / "constraints.txt"
STAMP = VENV / "made-from"
FULL_CHECK = ("tests", "lint", "types", "docs")
OLDEST_PYTHON = (3, 10)
QUIET_PIP = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_WARN_SCRIPT_LOCATION": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}
EPILOG = """\
examples:
  python3 dev.py tests                the full check: sessions tests, lint, types and docs
  python3 dev.py demo                 the example, in an environment of its own
  python3 dev.py lint types           any sessions of noxfile.py
  python3 dev.py tests -- -k layout   arguments after -- go to pytest
"""


def main() -> int:
    """Make the environment if need be, run the sessions, return nox's exit code."""
    parser = argparse.ArgumentParser(
        prog="dev.py",
        description="Run nox sessions of this repository; only Python is needed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sessions",
        nargs="+",
        metavar="session",
        help="a session of noxfile.py (tests lint types docs demo dist); tests stands for the full check",
    )
    ours, posargs = split_at_double_dash(sys.argv[1:])
    sessions = expand(parser.parse_args(ours).sessions)
    refuse_unusable_python()
    python = environment_python()
    sys.stdout.flush()
    sys.stderr.flush()
    nox = [str(python), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "--sessions"]
    beside = [] if posargs or "tests" not in sessions else [s for s in sessions if s != "tests"]
    after = ["--", *posargs] if posargs else []
    try:
        with run_beside(nox, beside) as other:
            status = run_nox([*nox, *(["tests"] if beside else sessions), *after])
    except KeyboardInterrupt:
        return 130
    return status or other.status


class Beside:
    """How the sessions ended that ran beside the tests."""

    status = 0


@contextmanager
def run_beside(nox: list[str], sessions: list[str]) -> Iterator[Beside]:
    """Run sessions while the block does something else; what they say is shown when both are done."""
    ending = Beside()
    if not sessions:
        yield ending
        return
    with tempfile.TemporaryFile("w+") as said:
        other = subprocess.Popen(
            [*nox, *sessions], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield ending
        except BaseException:
            other.terminate()
            raise
        finally:
            ending.status = other.wait()
            said.seek(0)
            shutil.copyfileobj(said, sys.stdout)
            sys.stdout.flush()


def run_nox(command: list[str]) -> int:
    """Run nox and return its exit code."""
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def split_at_double_dash(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return what stands before the first `--` and what stands after it."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def expand(sessions: list[str]) -> list[str]:
    """Replace `tests` by the full check, keep the order, name nothing twice."""
    names = [n for s in sessions for n in (FULL_CHECK if s == "tests" else (s,))]
    return list(dict.fromkeys(names))


def refuse_unusable_python() -> None:
    """Exit with one line if this Python cannot make the environment."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"dev.py: needs Python 3.10 or newer, this is {found} ({sys.executable})")
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            sys.exit(
                f"dev.py: {sys.executable} lacks the standard module {module}; "
                f"on Debian and Ubuntu: apt install python3-venv"
            )


def environment_python() -> Path:
    """Return the Python of .venv-dev, made anew if it is missing or was made from something else."""
    python = VENV / "bin" / "python"
    wanted = fingerprint()
    if python.exists() and STAMP.is_file() and STAMP.read_text(encoding="utf-8") == wanted:
        return python
    print("dev.py: making .venv-dev (once)", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    run_or_exit([sys.executable, "-m", "venv", VENV], "cannot make .venv-dev")
    install = [python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, "nox"]
    run_or_exit(install, "cannot install nox into .venv-dev")
    STAMP.write_text(wanted, encoding="utf-8")  # last: an interrupted setup is done again
    return python


def fingerprint() -> str:
    """Return what .venv-dev depends on: the pins and the interpreter it was made with."""
    pins = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
    return f"{pins}\n{sys.version}\n{sys.base_prefix}\n"


def run_or_exit(command: list[object], failure: str) -> None:
    """Run quietly; if it fails, show what it said and exit with its code."""
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **QUIET_PIP},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        print(f"dev.py: {failure} (exit code {done.returncode}, see above)", file=sys.stderr)
        sys.exit(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
