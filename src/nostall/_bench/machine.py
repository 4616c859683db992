"""Where a run took place: what anybody needs to know before comparing its figures with others."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

import nostall
from nostall._bench.options import Options, as_stored
from nostall._model.checksum import use_fastest

_PEERS = (
    *("torchsnapshot", "torch_checkpointing", "nvidia-resiliency-ext", "safetensors"),
    *("numpy", "psutil"),
)


def about_run(command: Sequence[str], options: Options, directory: Path) -> dict[str, Any]:
    """What a report of any kind says of a run itself."""
    return {
        "command": tuple(command),
        "options": as_stored(options),
        "machine": machine_facts(directory),
        "versions": versions(),
    }


def machine_facts(directory: Path) -> dict[str, Any]:
    """Processor, memory, kernel, and the file system of a directory."""
    return {
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_nbytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "file_system": file_system_of(directory),
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def versions() -> dict[str, str]:
    """Versions of Python, torch, nostall and what else is installed."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "nostall": nostall.__version__,
        "crc32": "zlib" if use_fastest() is None else "isal",
    }
    for name in _PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def file_system_of(directory: Path) -> str:
    """The type of the file system that holds a directory, as in the mount table."""
    path = directory.resolve()
    best, kind = -1, "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mounted, this_kind, *_ = line.split()
        # Blanks and the like are written as octal escapes there.
        point = Path(mounted.encode().decode("unicode_escape"))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), this_kind
    return kind


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Hardware", "cpu model")):
            return line.partition(":")[2].strip()
    return platform.machine()
