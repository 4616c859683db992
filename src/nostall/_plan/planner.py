"""What nostall knows about DCP's planners: their errors, their switches, their bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from nostall import _torch
from nostall._plan.structure import OPENERS, Opener, Openers, qualified_name
from nostall.errors import NostallError, SaveError


@contextmanager
def planner_failures() -> Iterator[None]:
    """Translate DCP's ``CheckpointException`` from a planner into an ``Exception``.

    Only an ``Exception`` can be sent to other ranks. A ``CheckpointException`` is not one: raised
    elsewhere, it is known to all ranks already.

    Raises:
        SaveError: The planner raised a ``CheckpointException``.
    """
    try:
        yield
    except _torch.CheckpointException as error:
        raise SaveError(f"the planner raised {error!r}", phase="plan") from error


@dataclass(frozen=True, slots=True)
class Vouched:
    """A planner whose plan follows from its switches and the structure of the state."""

    serialize: Callable[[Any], bytes]
    """Returns the bytes that it writes for a leaf without tensors."""
    openers: Openers


_vouched: dict[type | str, Vouched] = {}


def vouch_for(
    planner: type[DefaultSavePlanner] | str,
    *,
    serialize: Callable[[Any], bytes] | None = None,
    openers: Mapping[type | str, Opener] | None = None,
) -> None:
    """Let saves by a planner of one's own plan once per structure, as those by DCP's planner.

    Call it once per process, before the first save. It is a promise about exactly this class: its
    plan depends on nothing but the attributes of the planner that are ``bool``, ``int`` or ``str``,
    and on names, types, shapes, strides, dtypes and devices in the state dict; and an item's value
    is a tensor of the state dict, or what ``serialize`` returns. The second save of a structure in
    a row is compared with the first; later ones call no method of the planner.

    Args:
        planner: The class, or where its module is not to be imported yet its name, as in
            ``package.module.Class``. Subclasses plan every save unless they are vouched for, too.
        serialize: Returns the bytes of a leaf without tensors; ``torch.save``'s by default.
        openers: By class, or its name, of leaves that have tensors, such as a framework's sharded
            tensors: a function which returns what the leaf's items follow from, apart from the
            tensors, in a form that can be compared; and its tensors, in the order of its items.
    """
    _vouched[planner] = Vouched(serialize or serialized, {**OPENERS, **(openers or {})})


def vouched(planner: SavePlanner) -> Vouched | None:
    """The knowledge of a planner that lets it plan once; ``None`` if it plans every save."""
    if is_stocks_own(planner):
        return Vouched(serialized, OPENERS)
    if _torch.caches_plans(planner):
        return None
    return _vouched.get(type(planner)) or _vouched.get(qualified_name(type(planner)))


def planner_key(planner: SavePlanner) -> Any:
    """The planner's class and switches, before it has seen a state dict."""
    switches = {
        name: value
        for name, value in vars(planner).items()
        if isinstance(value, bool | int | str) and name != "is_coordinator"
    }
    return type(planner), tuple(sorted(switches.items()))


def is_stocks_own(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether this is DCP's own planner as usual: its plan depends on the structure only."""
    return (
        type(planner) is DefaultSavePlanner
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
        and not _torch.caches_plans(planner)
    )


def serialized(value: Any) -> bytes:
    """An object as serialised by DCP's planner."""
    if type(value) in _SCALARS and _is_short(value):
        return _serialize_scalar(type(value).__name__, repr(value), value)
    return _saved(value)


_SCALARS = (bool, int, float, str, type(None))
_LONGEST_KEPT = 256
"""Characters of a string, or bits of an integer; the cache takes a few megabytes at most."""


def _is_short(value: bool | float | str | None) -> bool:  # noqa: FBT001  # a value of the user's
    if isinstance(value, str):
        return len(value) <= _LONGEST_KEPT
    return not isinstance(value, int) or value.bit_length() <= _LONGEST_KEPT


@lru_cache(maxsize=4096)
def _serialize_scalar(_kind: str, _text: str, value: Any) -> bytes:
    # The key has more than the value, because 1 == 1.0 == True and 0.0 == -0.0.
    return _saved(value)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def without_state(planner: SavePlanner) -> SavePlanner:
    """A planner that can still make global plans, but keeps no tensor of this save alive."""
    twin = copy(planner)
    vars(twin).pop("state_dict", None)
    return twin


def as_save_error(error: BaseException, rank: int) -> NostallError:
    """An error of planning as one of ours; ours stay as they are."""
    if isinstance(error, NostallError):
        return error
    return SaveError(f"{type(error).__name__}: {error}", rank=rank, phase="plan")
