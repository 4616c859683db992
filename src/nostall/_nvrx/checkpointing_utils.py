"""The functions of ``nvidia_resiliency_ext.checkpointing.utils``, under the names that others use.

Its other packages (``checkpointing.local``) log with these, and test suites compare with ``diff``.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

__all__ = [
    "debug_msg",
    "debug_time",
    "dict_list_map_outplace",
    "diff",
    "logger_stack",
    "preload_tensors",
    "wrap_for_async",
]

_log = logging.getLogger("nostall")
_blocks: ContextVar[tuple[tuple[str, ...], logging.Logger]] = ContextVar(
    "nostall_blocks", default=((), _log)
)
"""Names of the enclosing blocks of this thread, and the logger of the innermost that has one."""


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Names of the enclosing blocks, joined by dots, and the logger of the innermost that has one.

    Args:
        name: Name of this block.
        current_logger: Logger of this block.
    """
    names, logger = outer = _blocks.get()
    if name:
        names = (*names, name)
    if current_logger is not None:
        logger = current_logger
    _blocks.set((names, logger))
    try:
        yield ".".join(names), logger
    finally:
        _blocks.set(outer)


@contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log how long a block, or each call of a decorated function, takes.

    Args:
        name: Name of the block.
        logger: That of the enclosing block if ``None``.
        threshold: Seconds below which nothing is logged.
        level: If ``None``, ``DEBUG`` without a threshold and ``WARNING`` with one.
    """
    if level is None:
        level = logging.DEBUG if threshold == float("-inf") else logging.WARNING
    with logger_stack(name, logger) as (names, found):
        began_s = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - began_s
            if took_s >= threshold:
                found.log(level, "%s took %.4fs", names, took_s)


def debug_msg(msg: str) -> None:
    """Log a message with the names of the enclosing blocks."""
    with logger_stack() as (names, logger):
        logger.debug("%s %s", names, msg)


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """The same nested dicts and lists, with ``f`` applied to everything else in them."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def preload_tensors(
    state_dict: dict[str, Any],
    non_blocking: bool = True,  # noqa: FBT001, FBT002  # an established signature
) -> Any:
    """A copy of nested dicts and lists, with tensors in host memory.

    Args:
        state_dict: Nested dicts and lists with the tensors.
        non_blocking: Whether the copies may still be under way when this returns.
    """

    def preload(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to("cpu", non_blocking=non_blocking, copy=True)

    return dict_list_map_outplace(preload, state_dict)


@contextmanager
def _disable_gc() -> Iterator[None]:
    """No garbage collection in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def wrap_for_async(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``fn`` without garbage collection."""

    @wraps(fn)
    def wrapped(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_gc():
            return fn(state_dict, *args, **kwargs)

    return wrapped


def diff(
    x1: Any, x2: Any, prefix: tuple[Any, ...] = ()
) -> tuple[list[Any], list[Any], list[tuple[Any, ...]]]:
    """Differences of two nested structures.

    Returns:
        Paths that only ``x1`` has; paths that only ``x2`` has; and for each pair of values that
        are not equal the path and both types. A path is a tuple of keys and positions.
    """
    if hasattr(x1, "replica_id") and hasattr(x2, "replica_id"):  # Megatron's sharded tensors
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    left, right = _parts(x1), _parts(x2)
    if left is None or right is None:
        mismatch = [] if _is_equal(x1, x2) else [(prefix, type(x1), type(x2))]
        return [], [], mismatch
    only_left: list[Any] = [(*prefix, key) for key in left if key not in right]
    only_right: list[Any] = [(*prefix, key) for key in right if key not in left]
    mismatch = []
    for key in left:
        if key in right:
            inner = diff(left[key], right[key], (*prefix, key))
            only_left += inner[0]
            only_right += inner[1]
            mismatch += inner[2]
    return only_left, only_right, mismatch


def _parts(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, dict):
        return value
    # An array of NumPy, which nostall does not need, has a type of this name.
    if isinstance(value, list | tuple) or type(value).__name__ == "ndarray":
        return dict(enumerate(value))
    return None


def _is_equal(x1: Any, x2: Any) -> bool:
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        return torch.equal(x1.cpu(), x2.cpu())
    try:
        return bool(x1 == x2)
    except (RuntimeError, ValueError):  # of an element-wise comparison
        return False
