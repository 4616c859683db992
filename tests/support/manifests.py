"""Checkpoints with a manifest of the test's own."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nostall._commit.manifest import split


def with_manifest_of(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Give a checkpoint a manifest that is valid but for what ``change`` does to it."""
    content = (path / ".metadata").read_bytes()
    _, manifest = split(content, path="")
    assert manifest is not None
    end = manifest.metadata_nbytes + manifest.index_nbytes
    plain = json.loads(content[end + 1 :].split(b"\n")[0])
    change(plain)
    line = json.dumps(plain).encode() + b"\n"
    footer = f"#nostall-manifest {len(line):012d} {zlib.crc32(line):08x}\n".encode()
    (path / ".metadata").write_bytes(content[:end] + b"\n" + line + footer)
