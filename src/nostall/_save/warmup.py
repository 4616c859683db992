"""Warm-up: the process and the memory that the first save needs, before it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from nostall._engine import Engine, default_engine
from nostall._model.threads import uninterrupted
from nostall._plan.layout import FileNaming, Packing
from nostall._save.stager import shapes_planned_alone
from nostall.errors import NostallError, OptionError, SaveTimeoutError
from nostall.options import is_possible_wait, require_integer

_log = logging.getLogger("nostall")

_CONTAINERS_NBYTES = 2 << 20
"""Reserved for containers: 1.4 KB per tensor."""


def warmup(share: int | Mapping[str, Any] = 0, *, timeout: float = 30.0, wait: bool = True) -> None:
    """Start the writer process and reserve snapshot memory before the first save needs them.

    Without it, most of the time of a first save is the system's, for new memory: a first
    ``dcp.async_save`` of 1 GiB blocks for 630 to 680 ms and is durable after 1.2 to 1.3 s; after
    ``warmup`` it blocks for 75 to 85 ms and is durable after 0.6 to 0.7 s, as later ones.

    Args:
        share: The state dict that will be saved, or the size of this rank's share of it in bytes.
            Tensors that are replicated over ranks count in full: if the split functions save them,
            pass the size instead. 0 starts the process only.
        timeout: Seconds to wait for the process.
        wait: Whether to return when everything is ready. If not, a thread reserves the memory, and
            the first save waits for it, for ``EngineOptions.save_timeout_s`` at most; it raises the
            errors, too.

    Raises:
        ReservationError: There is not enough host memory.
        SaveTimeoutError: The process did not start in time.
        OptionError: ``share`` or ``timeout`` is not possible.
    """
    if not is_possible_wait(timeout):
        raise OptionError(f"timeout={timeout!r} is not possible", hint="use seconds")
    engine = default_engine()
    if not isinstance(share, Mapping | Integral):
        raise OptionError(
            f"warmup() got an object of type {type(share).__name__}",
            hint="pass the state dict that will be saved, or a number of bytes",
        )
    if isinstance(share, Mapping):
        nbytes = _snapshot_nbytes(share, engine)
    else:
        nbytes = require_integer("share", share, at_least=0)
    if wait:
        with uninterrupted():
            _warm_up(engine, nbytes, timeout)
        return

    def warm_up() -> None:
        try:
            _warm_up(engine, nbytes, timeout)
        except NostallError as error:  # the first save meets it, too
            _log.warning("the warm-up failed: %s", error)

    with uninterrupted():
        engine.reserve_on_thread(warm_up)


def _warm_up(engine: Engine, nbytes: int, timeout_s: float) -> None:
    writer = engine.writer()
    if nbytes:
        lease = engine.lease(nbytes + _CONTAINERS_NBYTES)
        lease.block.populate()
        lease.release()
    if not writer.wait_ready(timeout_s):
        raise SaveTimeoutError(
            f"writer process {writer.pid} was not ready within {timeout_s:g} s, or ended",
            phase="warmup",
            hint="its standard error says why; sys.executable must be a Python interpreter",
        )


def _snapshot_nbytes(state_dict: Mapping[str, Any], engine: Engine) -> int:
    shapes = shapes_planned_alone(state_dict)
    naming = FileNaming(prefix="", separation_hint=None)
    nbytes = engine.lay_out(shapes, naming, Packing(file_count=1)).image_nbytes
    return min(nbytes, engine.options.max_wave_nbytes or nbytes)
