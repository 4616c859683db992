"""The header of a file of safetensors, as arithmetic over names, dtypes and shapes.

A file is an unsigned 64-bit length, little endian; a header of that length in JSON; and the bytes
of the tensors, in row-major order, one after the other without gaps
(https://huggingface.co/docs/safetensors/index#format). As the package ``safetensors`` does it:

* tensors lie in the order of their dtypes, the last of :data:`DTYPES` first, then in that of their
  names in UTF-8. So each lies at a multiple of its element size;
* the header ends with spaces, up to a multiple of 8.

``__metadata__`` has what DCP's writer puts there: where each tensor begins in the one that it is a
part of, under the key with which DCP's Hugging Face reader looks for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from nostall._model.values import TensorEntry
from nostall.errors import NostallError

DTYPES = {
    "bool": "BOOL",
    "float4_e2m1fn_x2": "F4",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""The format's names of torch's dtypes, in the order of ``enum Dtype`` in
https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs. Checked against
safetensors 0.8.0, whose other dtypes, of six bits, torch does not have."""
_RESERVED = "__metadata__"
"""Not a name for a tensor."""
_RANKS = {name: rank for rank, name in enumerate(DTYPES.values())}
_ALIGNMENT = 8
_MOST_NBYTES = 100_000_000
"""The package reads no longer header."""


def entry_of(
    name: Any, dtype: str, shape: Sequence[int], offsets: Sequence[int]
) -> TensorEntry | None:
    """The entry of a tensor; ``None`` if the format has no such dtype or name.

    ``name`` may be of any type, if the planner does not flatten. ``dtype`` is torch's name without
    ``torch.``; ``offsets`` is where the tensor begins in the one that it is a part of.
    """
    named = DTYPES.get(dtype)
    if named is None or not _is_name(name):
        return None
    sizes = tuple(shape)
    if named == "F4":  # of which torch counts pairs
        if not sizes:
            return None
        sizes = (*sizes[:-1], 2 * sizes[-1])
    return TensorEntry(name=name, dtype=named, shape=sizes, offsets=tuple(offsets))


def _is_name(name: object) -> bool:
    if type(name) is not str or name == _RESERVED:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        return False
    return True


def order_of(entry: TensorEntry) -> tuple[int, str]:
    """Sorts the tensors of a file."""
    return -_RANKS[entry.dtype], entry.name


def header_of(tensors: Sequence[tuple[TensorEntry, int]]) -> bytes:
    """The bytes before the first tensor, for entries and payload lengths in plan order.

    ``NostallError`` if there are too many tensors for one file.
    """
    parts = {each.name: {"saved_offsets": each.offsets} for each, _ in tensors}
    header: dict[str, Any] = {
        _RESERVED: {
            "DCP_SHARDING_INFO": json.dumps(parts),
            "DCP_VERSION": "1.0",
            "format": "pt",
        }
    }
    at = 0
    for entry, nbytes in sorted(tensors, key=lambda each: order_of(each[0])):
        end = at + nbytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (at, end),
        }
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MOST_NBYTES:
        raise NostallError(
            f"the header of a file with {len(tensors)} tensors has {len(text)} bytes; safetensors"
            f" reads at most {_MOST_NBYTES}",
            phase="plan",
            hint="use more files, with thread_count",
        )
    return len(text).to_bytes(8, "little") + text
