"""Pinned memory, which the copy engines of CUDA fill at full speed."""

from __future__ import annotations

import logging
from contextlib import suppress

import torch

from nostall._memory.arena import Block, address_of

_log = logging.getLogger("nostall")

_ALREADY_REGISTERED = 712
"""``cudaErrorHostMemoryAlreadyRegistered``."""


class Pinning:
    """Which blocks are pinned. Not thread-safe."""

    def __init__(self) -> None:
        self._pinned: set[int] = set()
        self._may_pin = True
        """Until the first refusal: each attempt is slow, and the next would be refused, too."""

    def pin(self, block: Block) -> None:
        """Pin a block, if CUDA is initialised and has refused none before."""
        if block.id in self._pinned or not self._may_pin:
            return
        try:
            if pin(address_of(block), block.nbytes):
                self._pinned.add(block.id)
        except RuntimeError as error:
            self._may_pin = False
            _log.warning(
                "snapshot memory is not pinned, copies off the device are slower: %s", error
            )

    def unpin(self, block: Block) -> None:
        """Undo :meth:`pin`, if it did anything."""
        if block.id in self._pinned:
            self._pinned.discard(block.id)
            torch.cuda.cudart().cudaHostUnregister(address_of(block))


def pin(address: int, nbytes: int) -> bool:
    """Pin host memory for the CUDA copy engines; false if CUDA is absent or not initialised.

    Raises:
        RuntimeError: CUDA refused.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        # Clears this thread's last CUDA error, which torch would report for the next kernel.
        with suppress(RuntimeError):
            torch.ones((), device="cuda")
    if code not in (0, _ALREADY_REGISTERED):
        raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with code {code}")
    return True
