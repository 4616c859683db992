"""Mount directories through a file system with caches and faults; see ``passthrough.py``."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from support.waiting import wait_until

_PROGRAM = Path(__file__).with_name("passthrough.py")
_CONNECTIONS = "/sys/fs/fuse/connections"


def why_not() -> str | None:
    """Why nothing can be mounted here; ``None`` if it can."""
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    if find_library("fuse3") is None:
        return "libfuse3 is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    return None if os.geteuid() == 0 else "only root is sure to be able to mount"


class Mount:
    """A directory as another host sees it: a mount with its own caches, in its own process.

    For ``cache_s`` the kernel believes what it was told of attributes, names, and names that are
    not there. Other options are those of ``passthrough.py``.
    """

    def __init__(
        self, directory: Path, *, cache_s: float = 0.0, o_direct: bool = True, **more: float
    ) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="nostall-mount-")
        self.path = Path(self._own.name) / "mounted"
        self.path.mkdir()
        self.control = str(Path(self._own.name) / "control")
        timeouts = ("attr_timeout", "entry_timeout", "negative_timeout", "ac_attr_timeout")
        options = {**dict.fromkeys(timeouts, cache_s), "o_direct": o_direct, **more}
        outside = os.stat(self.path).st_dev
        self._process = subprocess.Popen(
            [
                *(sys.executable, str(_PROGRAM), str(directory), str(self.path)),
                *(self.control, json.dumps(options)),
            ],
            stdin=subprocess.PIPE,
            env={**os.environ, "FUSE_LIBRARY_NAME": "fuse3"},
        )
        try:
            wait_until(lambda: self._is_mounted(outside))
        except BaseException:
            self.close()
            raise
        self._connection = os.minor(os.stat(self.path).st_dev)

    def _is_mounted(self, outside: int) -> bool:
        assert self._process.poll() is None, "the file system's process has ended"
        return os.stat(self.path).st_dev != outside

    def close(self) -> None:
        """End the file system, even if a process is stuck in it, and unmount it."""
        with suppress(OSError):
            Path(f"{_CONNECTIONS}/{self._connection}/abort").write_text("1")
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        self._own.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def ask(control: str, **request: Any) -> dict[str, Any]:
    """Send a request to a mounted file system, from any process; its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30.0)
        connection.connect(control)
        with connection.makefile("rw") as stream:
            stream.write(json.dumps(request) + "\n")
            stream.flush()
            answer = json.loads(stream.readline())
    assert isinstance(answer, dict)
    return answer


def fault(op: str, do: str, **details: Any) -> dict[str, Any]:
    """A fault for ``ask(control, faults=[...])``; see ``passthrough.Faults``."""
    return {"op": op, "do": do, **details}
