"""A stream extension of a user's own: compression with zlib."""

from __future__ import annotations

import io
import zlib
from typing import IO

from torch.distributed.checkpoint._extension import StreamTransformExtension


class Zlib(StreamTransformExtension):
    """Every item of a checkpoint is a zlib stream of its own."""

    @staticmethod
    def registry_name() -> str:
        return "stream.zlib"

    @staticmethod
    def from_descriptor(version: str) -> Zlib:
        assert version == "1"
        return Zlib()

    def get_descriptor(self) -> str:
        return "stream.zlib/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Compressing(output)

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002  # torch's name
        return io.BytesIO(zlib.decompress(input.read()))


class _Compressing(io.BytesIO):
    def __init__(self, output: IO[bytes]) -> None:
        super().__init__()
        self._output = output

    def close(self) -> None:
        if not self.closed:
            self._output.write(zlib.compress(self.getvalue()))
            self._output.close()
        super().close()
