"""Run nox with nothing but Python installed: `python3 dev.py`, or `python3 dev.py demo`.

Makes .venv-dev/ with nox in it once, again when constraints.txt changes, and hands over to nox.
Standard library only.
"""

from __future__ import annotations  # also lets a Python that is too old get as far as saying so

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv-dev"
CONSTRAINTS = ROOT / "constraints.txt"
STAMP = VENV / "made-from"
OLDEST_PYTHON = (3, 10)
BESIDE_THE_TESTS = ("lint", "types", "docs")
QUIET_PIP = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_WARN_SCRIPT_LOCATION": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}
USAGE = """\
usage: python3 dev.py [session ...] [-- arguments of the session]

  python3 dev.py                      the full check: tests, lint, types, docs
  python3 dev.py demo                 the example, in an environment of its own
  python3 dev.py tests -- -k layout   one session of noxfile.py; arguments after -- go to pytest
"""


def main() -> int:
    """Make the environment if need be, run the sessions, return nox's exit code."""
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    sessions, rest = arguments[:at], arguments[at:]
    if any(each.startswith("-") for each in sessions):
        sys.stdout.write(USAGE)
        return 0 if sessions in (["-h"], ["--help"]) else 2
    refuse_unusable_python()
    nox = [str(environment_python()), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    sys.stdout.flush()
    try:
        if not sessions and not rest:
            return full_check(nox)
        chosen = ["--sessions", *sessions] if sessions else []
        return subprocess.run([*nox, *chosen, *rest], cwd=ROOT, check=False).returncode
    except KeyboardInterrupt:
        return 130


def full_check(nox: list[str]) -> int:
    """Run the tests, and beside them the other sessions, as tests often wait; the exit code.

    What the others print is shown after the tests.
    """
    with tempfile.TemporaryFile() as printed:
        others = subprocess.Popen(
            [*nox, "--sessions", *BESIDE_THE_TESTS],
            cwd=ROOT,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        try:
            tests = subprocess.run([*nox, "--sessions", "tests"], cwd=ROOT, check=False).returncode
        finally:
            others.wait()  # it gets Ctrl-C, too
        printed.seek(0)
        sys.stdout.write(printed.read().decode(errors="replace"))
        sys.stdout.flush()
    return tests or others.returncode


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
    """Return the Python of .venv-dev, made anew if it is missing or was made from other pins."""
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
