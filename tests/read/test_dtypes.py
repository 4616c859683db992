"""Every dtype and layout is loaded as stock's ``dcp.load`` loads it, or refused where it refuses.

A tensor is saved by stock, and loaded into twins of one target by stock's reader and by ours.
Afterwards both twins have the same bits, or both readers have raised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

import nostall
from nostall.errors import NostallError
from support.states import save_stock_way

# torch deprecates quantised tensors, and warns of what a conversion loses and of what is new.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantiz.*"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),
    pytest.mark.filterwarnings("ignore:.*[Ss]parse"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

LARGE = 300 << 10
"""Elements of what is read alone, however short each of them is."""
NOT_SAVED = {
    *(torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4),
    *(torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2),
    *(getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8)),
    torch.complex128,
}
"""Dtypes whose tensors stock does not save, or not by themselves."""
DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)} - NOT_SAVED, key=str
)
Make = Callable[[], torch.Tensor]


def values_of(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Arbitrary bits, those of NaNs among them; of bools ones and zeros."""
    bits = torch.arange(count * dtype.itemsize) * 37 % (2 if dtype is torch.bool else 256)
    return bits.to(torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The values of a tensor as bytes, whatever its dtype and layout."""
    if isinstance(tensor, TwoTensor):
        return bits(tensor.a) + bits(tensor.b)
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    found = tensor.resolve_conj().resolve_neg().contiguous()
    return found.reshape(-1).view(torch.uint8).numpy().tobytes()


def outcome(load: Callable[[dict[str, Any]], object], target: torch.Tensor) -> bytes | str:
    """The bits of the target afterwards, or that it was refused."""
    try:
        load({"x": target})
    except (CheckpointException, NostallError, RuntimeError, ValueError):
        # NotImplementedError is a RuntimeError; what stock's planner says is its own.
        return "refused"
    return bits(target)


def by_stock(path: Path, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def by_reader(path: Path, state: dict[str, Any]) -> None:
    reader = nostall.FileSystemReader(path, verify="crc")
    dcp.load(state, storage_reader=reader, no_dist=True)


def require_same(path: Path, saved: torch.Tensor, make_target: Make) -> bytes | str:
    """Save a tensor, and load it three times; what has become of all targets."""
    save_stock_way(path, {"x": saved})
    expected = outcome(partial(by_stock, path), make_target())
    assert outcome(partial(by_reader, path), make_target()) == expected
    assert outcome(lambda state: nostall.load(state, path), make_target()) == expected
    return expected


@pytest.mark.parametrize("count", [0, 1, 7, LARGE], ids=["empty", "one", "small", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, count: int) -> None:
    """All bits of the values come back, whatever they mean, without the slow ``torch.load``."""
    saved = values_of(dtype, count)
    save_stock_way(tmp_path, {"x": saved})

    def loaded(load: Callable[[dict[str, Any]], object]) -> bytes | str:
        blank = torch.zeros(count * dtype.itemsize, dtype=torch.uint8)
        return outcome(load, blank.view(dtype))

    with patch.object(torch, "load", side_effect=AssertionError("loaded by torch")):
        assert loaded(partial(by_reader, tmp_path)) == bits(saved)
        assert loaded(lambda state: nostall.load(state, tmp_path)) == bits(saved)
    # With torch 2.9 stock cannot copy a float4.
    assert loaded(partial(by_stock, tmp_path)) in (bits(saved), "refused")


@pytest.mark.parametrize("count", [7, LARGE], ids=["small", "large"])
def test_other_dtypes_of_targets(tmp_path: Path, count: int) -> None:
    """Values are converted as ``copy_`` converts them."""
    for stored, wanted in (
        (torch.float32, torch.bfloat16),
        (torch.float8_e5m2, torch.float64),
        (torch.int64, torch.bool),
        (torch.uint64, torch.float32),
        (torch.complex64, torch.float32),
    ):
        saved = (torch.arange(count) % 113).to(stored)
        make_target = partial(torch.zeros, count, dtype=wanted)
        found = require_same(tmp_path / f"{stored}", saved, make_target)
        assert found == bits(torch.zeros(count, dtype=wanted).copy_(saved))


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 1013).to(dtype).reshape(shape)


def quantised(values: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(values, 0.5, 3, torch.qint8)


SHAPES = {"small": (6, 4), "large": (600, 180)}
STORED: dict[str, Callable[..., torch.Tensor]] = {
    "contiguous": whole,
    "transposed": lambda rows, columns: whole(columns, rows).t(),
    "rows of a view": lambda rows, columns: whole(rows + 7, columns)[3:-4],
    "expanded": lambda rows, columns: whole(1, columns).expand(rows, columns),
    "huge stride": lambda rows, columns: torch.as_strided(
        whole(rows * 5000), (rows, columns), (4999, 1)
    ),
    "conjugate": lambda rows, columns: whole(rows, columns, dtype=torch.complex64).mul(1j).conj(),
    "negative": lambda rows, columns: (
        torch.complex(whole(rows, columns), whole(rows, columns)).conj().imag
    ),
    "parameter": lambda rows, columns: torch.nn.Parameter(whole(rows, columns)),
    "quantised": lambda rows, columns: quantised(whole(rows, columns)),
    "two tensors": lambda rows, columns: TwoTensor(whole(rows, columns), whole(rows, columns) + 1),
}


def inferred(rows: int, columns: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(rows, columns)


TARGETS: dict[str, Callable[..., torch.Tensor]] = {
    "contiguous": torch.zeros,
    "transposed": lambda rows, columns: torch.zeros(columns, rows).t(),
    "every second column": lambda rows, columns: torch.zeros(rows, 2 * columns)[:, ::2],
    "expanded": lambda rows, columns: torch.zeros(1, columns).expand(rows, columns),
    "conjugate": lambda rows, columns: torch.zeros(rows, columns, dtype=torch.complex64).conj(),
    "negative": lambda rows, columns: torch.zeros(rows, columns, dtype=torch.complex64).conj().imag,
    "parameter": lambda rows, columns: torch.nn.Parameter(torch.zeros(rows, columns)),
    "leaf that requires grad": partial(torch.zeros, requires_grad=True),
    "inference": inferred,
    "quantised": lambda rows, columns: quantised(torch.zeros(rows, columns)),
    "sparse": lambda rows, columns: torch.zeros(rows, columns).to_sparse(),
    "two tensors": lambda rows, columns: TwoTensor(
        torch.zeros(rows, columns), torch.zeros(rows, columns)
    ),
}


REFUSED = {"expanded", "sparse"}
"""Targets that ``copy_`` does not fill: elements that share memory, or have none."""


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("stored", STORED)
def test_every_layout_into_a_plain_tensor_and_its_own_kind(
    tmp_path: Path, stored: str, size: str
) -> None:
    """Views, subclasses and quantised tensors, small and large."""
    saved, shape = STORED[stored](*SHAPES[size]).detach(), SHAPES[size]
    is_plain = stored not in ("quantised", "two tensors")
    dtype = saved.dtype if is_plain else torch.float32
    with torch.serialization.safe_globals([TwoTensor]):
        found = require_same(tmp_path / "plain", saved, partial(torch.zeros, shape, dtype=dtype))
        if is_plain:
            assert found == bits(saved)
        if stored in TARGETS:
            own = require_same(tmp_path / "own", saved, partial(TARGETS[stored], *shape))
            assert own == ("refused" if stored in REFUSED else bits(saved))


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kind_of_target(tmp_path: Path, target: str, size: str) -> None:
    """A plain tensor is placed as stock places it, or neither reader takes the target."""
    saved = whole(*SHAPES[size])
    found = require_same(tmp_path, saved, partial(TARGETS[target], *SHAPES[size]))
    assert (found == "refused") is (target in REFUSED)


@pytest.mark.parametrize("size", [(), (0,), (3, 0, 2), (1, 1)], ids=str)
def test_shapes_with_one_element_or_none(tmp_path: Path, size: tuple[int, ...]) -> None:
    """Numbers of no dimension, and tensors without elements."""
    saved = whole(*size) + 5
    assert require_same(tmp_path, saved, partial(torch.zeros, size)) == bits(saved)
