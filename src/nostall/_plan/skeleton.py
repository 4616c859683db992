"""The file form of a tensor as torch writes it, without the payload."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch.utils.serialization import config


class _Skeleton(io.RawIOBase):
    """Receives a container without its payload: keeps the written parts and the one gap."""

    def __init__(self) -> None:
        self.parts: list[bytearray] = [bytearray()]
        self.gap_nbytes = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self.parts[-1] += piece
        return len(piece)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or len(self.parts) > 1:
            raise io.UnsupportedOperation("only one relative seek, over the payload, is expected")
        self.gap_nbytes = offset
        self.parts.append(bytearray())
        return self.tell()

    def tell(self) -> int:
        return sum(map(len, self.parts)) + self.gap_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSkeleton:
    """The file form of a tensor in ``torch.save``, without the payload."""

    prefix: bytes
    payload_nbytes: int
    suffix: bytes
    checksums: bool
    """Whether torch is set to store CRCs."""


def container_skeleton(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> ContainerSkeleton:
    """The container of a plain CPU tensor with its own exact storage, from ``torch.save``."""
    # Never touched (unless torch is set to be deterministic): it takes no memory, however large.
    stand_in = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    skeleton = _Skeleton()
    with torch.serialization.skip_data():
        torch.save(stand_in, cast("IO[bytes]", skeleton))
    before, after = skeleton.parts if skeleton.gap_nbytes else (b"", b"".join(skeleton.parts))
    return ContainerSkeleton(
        prefix=bytes(before),
        payload_nbytes=skeleton.gap_nbytes,
        suffix=bytes(after),
        checksums=bool(torch.serialization.get_crc32_options()),
    )


def container_settings() -> tuple[bool, int]:
    """The process-wide settings of torch that change a container: checksums, payload alignment."""
    return bool(torch.serialization.get_crc32_options()), int(config.save.storage_alignment)
