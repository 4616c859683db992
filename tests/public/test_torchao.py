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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from support.states import WAYS, read_metadata, save_stock_way, shard_files

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # they are about kernels for accelerators
    optim = pytest.importorskip("torchao.optim", reason="`nox -s torchao` installs it")
    quantization = pytest.importorskip(
        "torchao.quantization", reason="`nox -s torchao` installs it"
    )

Layers = torch.nn.Sequential


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


WEIGHTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "int8": partial(_quantised, quantization.Int8WeightOnlyConfig()),
    "float8": partial(_quantised, quantization.Float8WeightOnlyConfig()),
    "nf4": _nf4,
}


def _bytes_of(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _wrappers(state: Any) -> set[str]:
    """Names of the classes of torchao's in a nested state dict."""
    if isinstance(state, dict):
        return set().union(*map(_wrappers, state.values()))
    return {type(state).__name__} if type(state).__module__.startswith("torchao") else set()


def _load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def _assert_same_checkpoints(directory: Path, state: dict[str, Any]) -> None:
    """Files and metadata of every way to save equal stock's."""
    save_stock_way(directory / "stock", state)
    expected = read_metadata(directory / "stock")
    for way, save in WAYS.items():
        save(directory / way, state)
        got = read_metadata(directory / way)
        assert shard_files(directory / way) == shard_files(directory / "stock"), way
        assert got.state_dict_metadata == expected.state_dict_metadata
        assert got.storage_data == expected.storage_data


@pytest.mark.parametrize("kind", WEIGHTS)
def test_quantised_weights_come_back_bit_by_bit(tmp_path: Path, kind: str) -> None:
    """Weights are stored as by stock, which loads them into the same quantised model."""
    state = WEIGHTS[kind](0)
    assert _wrappers(state)
    _assert_same_checkpoints(tmp_path, state)
    for way in ["stock", *WAYS]:
        target = _load(tmp_path / way, WEIGHTS[kind](1))
        assert _wrappers(target) == _wrappers(state)
        assert _bytes_of(target) == _bytes_of(state)


def _trained(kind: Any, seed: int) -> tuple[Layers, torch.optim.Optimizer]:
    layers = _layers(seed)
    optimizer: torch.optim.Optimizer = kind(layers.parameters())
    for _ in range(2):
        layers(torch.randn(4, 128)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layers, optimizer


def _state(layers: Layers, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(layers, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizer_states_of_few_bits_come_back_bit_by_bit(tmp_path: Path, name: str) -> None:
    """States are stored as by stock, and training goes on from them exactly as before."""
    kind = getattr(optim, name)
    layers, optimizer = _trained(kind, 0)
    state = _state(layers, optimizer)
    assert _wrappers(state)
    _assert_same_checkpoints(tmp_path, state)
    inputs = torch.randn(4, 128)

    def one_more_step(layers: Layers, optimizer: torch.optim.Optimizer) -> bytes:
        layers(inputs).square().sum().backward()
        torch.manual_seed(7)  # some round at random
        optimizer.step()
        return _bytes_of([parameter.detach() for parameter in layers.parameters()])

    expected = one_more_step(layers, optimizer)
    for way in ["stock", *WAYS]:
        layers, optimizer = _trained(kind, 1)
        target = _load(tmp_path / way, _state(layers, optimizer))
        assert _wrappers(target) == _wrappers(state)
        set_state_dict(
            layers,
            optimizer,
            model_state_dict=target["model"],
            optim_state_dict=target["optimizer"],
        )
        assert one_more_step(layers, optimizer) == expected, way
