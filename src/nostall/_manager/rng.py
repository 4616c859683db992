"""States of the random number generators that a process has by default.

Those of ``random``, of NumPy's global generator if NumPy is imported, of torch, and of the current
accelerator if it is in use. Each is kept as bytes, so that one that cannot be restored does not
prevent the others.
"""

from __future__ import annotations

import importlib
import logging
import pickle
import random
import sys
from typing import Any

import torch

_log = logging.getLogger("nostall")


def rng_states() -> dict[str, bytes]:
    """The present states, by the name of the generator."""
    states = {"python": pickle.dumps(random.getstate()), "torch": _packed(torch.get_rng_state())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = pickle.dumps(numpy.random.get_state(legacy=False))
    device = _device_in_use()
    if device is not None:
        states[device] = _packed(torch.get_device_module(device).get_rng_state())
    return states


def set_rng_states(states: dict[str, bytes]) -> None:
    """Set them; one whose package or device is not available here is skipped with a warning."""
    for name, state in states.items():
        try:
            _set(name, state)
        except (ImportError, RuntimeError, AssertionError) as error:
            # torch raises either of the last two for a device that it does not have.
            _log.warning("the state of the generator of %s is not restored: %s", name, error)


def _set(name: str, state: bytes) -> None:
    match name:
        case "python":
            random.setstate(pickle.loads(state))
        case "numpy":
            importlib.import_module("numpy").random.set_state(pickle.loads(state))
        case "torch":
            torch.set_rng_state(_unpacked(state))
        case device:
            torch.get_device_module(device).set_rng_state(_unpacked(state))


def _device_in_use() -> str | None:
    """The kind of accelerator that this process has begun to use."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module: Any = torch.get_device_module(device)
    return device.type if module.is_initialized() else None


def _packed(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _unpacked(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
