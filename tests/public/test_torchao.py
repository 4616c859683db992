"""torchao's quantised weights and optimizer states are saved as stock does and load by stock."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from support.states import WAYS, read_metadata, save_stock_way, shard_files

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # they are about kernels for accelerators
    optim = pytest.importorskip("torchao.optim", reason="`nox -s torchao` installs it")
    quantization = pytest.importorskip(
        "torchao.quantization", reason="`nox -s torchao` installs it"
    )

Layers = torch.nn.Sequential
OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """The optimizers compile their steps, which takes a minute and changes nothing here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _layers(seed: int) -> Layers:
    torch.manual_seed(seed)
    return Layers(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))


def _quantised(config: Any, seed: int) -> dict[str, Any]:
    layers = _layers(seed).bfloat16()
    quantization.quantize_(layers, config)
    return layers.state_dict()


def _nf4(seed: int) -> dict[str, Any]:
    state = _layers(seed).bfloat16().state_dict()
    return {
        name: quantization.to_nf4(tensor) if tensor.dim() == 2 else tensor
        for name, tensor in state.items()
    }


def _trained(kind: Any, seed: int) -> dict[str, Any]:
    layers = _layers(seed)
    optimizer: torch.optim.Optimizer = kind(layers.parameters())
    for _ in range(2):
        layers(torch.randn(4, 128)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(layers, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


STATES: dict[str, Callable[[int], dict[str, Any]]] = {
    "int8": partial(_quantised, quantization.Int8WeightOnlyConfig()),
    "float8": partial(_quantised, quantization.Float8WeightOnlyConfig()),
    "nf4": _nf4,
    **{name: partial(_trained, getattr(optim, name)) for name in OPTIMIZERS},
}


def _bytes_of(value: Any) -> Any:
    """Each value of a nested state dict as ``torch.save`` writes it."""
    if isinstance(value, dict):
        return {name: _bytes_of(each) for name, each in value.items()}
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _wrappers(state: Any) -> set[str]:
    """Names of the classes of torchao's in a nested state dict."""
    if isinstance(state, dict):
        return set().union(*map(_wrappers, state.values()))
    return {type(state).__name__} if type(state).__module__.startswith("torchao") else set()


@pytest.mark.parametrize("kind", STATES)
def test_values_of_few_bits_come_back_bit_by_bit(tmp_path: Path, kind: str) -> None:
    """Weights and optimizer states are stored as by stock, which loads them into their like."""
    state = STATES[kind](0)
    assert _wrappers(state)
    save_stock_way(tmp_path / "stock", state)
    expected = read_metadata(tmp_path / "stock")
    for way, save in WAYS.items():
        save(tmp_path / way, state)
        got = read_metadata(tmp_path / way)
        assert shard_files(tmp_path / way) == shard_files(tmp_path / "stock"), way
        assert got.state_dict_metadata == expected.state_dict_metadata
        assert got.storage_data == expected.storage_data
    for way in ["stock", *WAYS]:
        target = STATES[kind](1)
        dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / way), no_dist=True)
        assert _wrappers(target) == _wrappers(state)
        assert _bytes_of(target) == _bytes_of(state), way
