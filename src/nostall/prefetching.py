"""``nostall.prefetch``: a checkpoint comes into the page cache while a program still starts.

A process of its own, which never imports torch, reads what this rank is likely to need. A load
finds that in the page cache, and ends the process before it reads the rest past the page cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nostall._commit.commit import committed_latest_first
from nostall._commit.manifest import manifest_alone
from nostall._model.names import METADATA_NAME, is_given_to_shards
from nostall._storage.locations import is_address, place_of
from nostall._storage.port import open_to_read
from nostall._storage.posix import PosixStorage
from nostall._storage.uncached import prefetching, stop_prefetching

__all__ = ["prefetch"]

_THREADS = 4
_PIECE_NBYTES = 4 << 20


def prefetch(path: str | os.PathLike[str]) -> None:
    """Begin to bring a checkpoint into this host's page cache, and return at once.

    Call it first in a program: imports and the making of the model then take place meanwhile, as
    does compiling. If as many ranks as ``torchrun`` has started (``WORLD_SIZE``) have saved the
    checkpoint, each brings the files of its own number, otherwise an even share of all. A host's
    ranks bring at most half of the available memory. A load of the checkpoint ends what is not
    finished, and reads the rest itself. An error is none here: the load will have it. An object
    store has no page cache, so its checkpoints stay where they are.

    Args:
        path: Checkpoint directory; or a directory of checkpoints, such as the root of a manager, of
            which the one that was committed last is taken.

    Raises:
        OptionError: ``path`` cannot name a checkpoint.
    """
    import psutil  # the process that reads may not find it

    place = place_of(path)
    if is_address(place):
        return
    place = os.path.realpath(place)
    stop_prefetching(place)
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    most_nbytes = psutil.virtual_memory().available // (2 * _number("LOCAL_WORLD_SIZE", 1))
    entry = (
        f"import sys; sys.path.append(sys.argv[1]); from {__name__} import main;"
        " main(sys.argv[2], *map(int, sys.argv[3:]))"
    )
    root = Path(__file__).resolve().parents[1]
    numbers = map(str, (rank, world_size, most_nbytes, os.getpid()))
    with suppress(OSError):  # no process can be started
        prefetching[place] = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", entry, root, place, *numbers],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) >= default else default


# --- the process that reads -----------------------------------------------------------------------


class _Piece(NamedTuple):
    """Neighbouring bytes of a file."""

    path: str
    begin: int
    nbytes: int


def main(path: str, rank: int, world_size: int, most_nbytes: int, parent: int) -> None:
    """Read a rank's part of the checkpoint at a path, while the parent lives."""
    os.nice(10)
    if not os.path.exists(os.path.join(path, METADATA_NAME)):
        path = committed_latest_first(path)[0]
    # Its next() is one instruction of the interpreter, so threads can share it.
    pieces = iter(_pieces(path, rank, world_size, most_nbytes))

    def read(memory: bytearray) -> None:
        for each in pieces:
            if os.getppid() != parent:
                return
            fd = os.open(each.path, os.O_RDONLY)
            os.preadv(fd, [memoryview(memory)[: each.nbytes]], each.begin)
            os.close(fd)

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(read, [bytearray(_PIECE_NBYTES) for _ in range(_THREADS)]))


def _pieces(path: str, rank: int, world_size: int, most_nbytes: int) -> list[_Piece]:
    """A rank's part, in the order of files and offsets."""
    storage = PosixStorage(path)
    with open_to_read(storage, METADATA_NAME) as stream:
        manifest = manifest_alone(stream)
    if manifest is None:
        names = sorted(filter(is_given_to_shards, storage.list()))
        sizes = {name: storage.stat(name).nbytes for name in names}
    else:
        sizes = {file.name: file.nbytes for file in sorted(manifest.files)}
    # As stock names them: "__3_0.distcp".
    ranks = {name: name.lstrip("_").partition("_")[0] for name in sizes}
    total, begin, end = sum(sizes.values()), 0, most_nbytes
    if len({*ranks.values()}) == world_size:
        sizes = {name: nbytes for name, nbytes in sizes.items() if ranks[name] == str(rank)}
    else:
        begin, end = (total * each // world_size for each in (rank, rank + 1))
        end = min(end, begin + most_nbytes)
    found: list[_Piece] = []
    offset = 0
    for name, nbytes in sizes.items():
        first, last = max(begin - offset, 0), min(end - offset, nbytes)
        found += [
            _Piece(storage.where(name), at, min(_PIECE_NBYTES, last - at))
            for at in range(first, last, _PIECE_NBYTES)
        ]
        offset += nbytes
    return found
