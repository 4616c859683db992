"""nostall under the module names of nvidia-resiliency-ext (NVRx), for frameworks that import those.

:func:`install` is the only way to switch it on, before anything imports NVRx's asynchronous
checkpointing. An unchanged script runs with it under::

    python -m nostall.nvrx_alias SCRIPT [ARGUMENT ...]
    torchrun --nproc-per-node 8 -m nostall.nvrx_alias SCRIPT [ARGUMENT ...]

An alias is nostall's own module, not a copy. Other parts of an installed NVRx (local checkpointing,
fault tolerance, in-process restart, ``checkpointing.utils``) stay its own, and find nostall's
modules where they import ``async_ckpt``.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch

from nostall import core, state_dict_saver
from nostall._queue.python_worker import prepare_new_workers
from nostall.errors import OptionError

__all__ = ["install", "main"]

_ROOT = "nvidia_resiliency_ext"
_CHECKPOINTING = f"{_ROOT}.checkpointing"
_ASYNC = f"{_CHECKPOINTING}.async_ckpt"
_UTILS = f"{_CHECKPOINTING}.utils"
_MODULES = (
    "cached_metadata_filesystem_reader",
    "core",
    "filesystem_async",
    "state_dict_saver",
    "torch_ckpt",
)
_VERSION = "0.7.0"
"""The release whose names these are (commit d8686d9). Megatron-core asks for 0.6.0 at least."""


def install(force: bool = False) -> None:  # noqa: FBT001, FBT002  # an established signature
    """Let imports of NVRx's asynchronous checkpointing find nostall, in this process. Idempotent.

    These are ``nvidia_resiliency_ext.checkpointing.async_ckpt`` with its modules ``core``,
    ``filesystem_async``, ``state_dict_saver``, ``torch_ckpt`` and
    ``cached_metadata_filesystem_reader``; and, if NVRx is not installed, ``diff`` and
    ``preload_tensors`` of ``nvidia_resiliency_ext.checkpointing.utils``.
    ``nvidia_resiliency_ext.__version__`` is at least "0.7.0". Processes that ``multiprocessing``
    spawns have to call this, too; nostall's own need not.

    Args:
        force: Use nostall also if NVRx's asynchronous checkpointing is installed.

    Raises:
        OptionError: NVRx's modules were imported before, so their importers would keep them; or
            they are installed, and ``force`` is false.
    """
    if sys.modules.get(f"{_ASYNC}.core") is core:
        return
    installed = _spec_of(f"{_ASYNC}.core")
    imported = sorted(name for name in sys.modules if name.startswith(f"{_ASYNC}."))
    if imported:
        raise OptionError(
            f"{imported[0]} was imported before nostall.nvrx_alias.install(), so its importers"
            " would keep using it",
            hint="call install() before anything imports it, or start the program with"
            " `python -m nostall.nvrx_alias`",
        )
    if installed is not None and not force:
        raise OptionError(
            f"nvidia-resiliency-ext is installed at {installed.origin}",
            hint="call install(force=True) to use nostall in place of its async_ckpt",
        )
    _put_aliases()
    vouch_for_megatrons_planner()
    # A function that others send to nostall's Python worker may come from a module that imports
    # these names.
    prepare_new_workers("from nostall import nvrx_alias; nvrx_alias.install(force=True)")


def _put_aliases() -> None:
    root = _package(_ROOT)
    own_version = getattr(root, "__version__", "")
    if _numbers(own_version) < _numbers(_VERSION):
        vars(root)["__version__"] = _VERSION
    _package(_CHECKPOINTING)
    _put(_ASYNC, _new_package(_ASYNC))
    for name in _MODULES:
        _put(f"{_ASYNC}.{name}", import_module(f"nostall.{name}"))
    if _spec_of(_UTILS) is None:
        utils = _put(_UTILS, ModuleType(_UTILS))
        vars(utils).update(diff=diff, preload_tensors=preload_tensors)


_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_LAYOUT = attrgetter("key", "dtype", "local_shape", "global_shape", "global_offset")
"""Fields that the item of a sharded tensor follows from, as Megatron's classes make it."""


def vouch_for_megatrons_planner() -> None:
    """Let Megatron's planner plan once per structure; imports nothing of Megatron.

    It makes an item per shard, and takes the bytes of objects as they are.
    """

    def open_tensor(leaf: Any) -> tuple[Any, Sequence[torch.Tensor]]:
        sharded = leaf._sh_ten
        return _LAYOUT(sharded), (sharded.data,)

    def open_container(leaf: Any) -> tuple[Any, Sequence[torch.Tensor]]:
        sharded = [each._sh_ten for each in leaf._local_shards]
        return list(map(_LAYOUT, sharded)), [each.data for each in sharded]

    state_dict_saver.vouch_for(
        f"{_STRATEGIES}.torch.MCoreSavePlanner",
        serialize=io.BytesIO.getvalue,
        openers={
            f"{_STRATEGIES}.checkpointable.CheckpointableShardedTensor": open_tensor,
            f"{_STRATEGIES}.checkpointable.LocalShardsContainer": open_container,
        },
    )


def _spec_of(name: str) -> ModuleSpec | None:
    """How a module would be imported; ``None`` if it or one of its packages is not installed."""
    try:
        return find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _package(name: str) -> ModuleType:
    """An installed package, or an empty one of this name."""
    if name in sys.modules or _spec_of(name) is not None:
        return import_module(name)
    return _put(name, _new_package(name))


def _new_package(name: str) -> ModuleType:
    made = ModuleType(name, "Names of nvidia-resiliency-ext that nostall provides.")
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    return made


def _put(name: str, module: ModuleType) -> ModuleType:
    sys.modules[name] = module
    package, _, leaf = name.rpartition(".")
    if package:
        setattr(sys.modules[package], leaf, module)
    return module


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def preload_tensors(
    state_dict: Any,
    non_blocking: bool = True,  # noqa: FBT001, FBT002  # an established signature
) -> Any:
    """A copy of nested dicts and lists, with tensors in host memory.

    Args:
        state_dict: Nested dicts and lists with the tensors.
        non_blocking: Whether the copies may still be in progress when this returns.
    """
    match state_dict:
        case dict():
            return {key: preload_tensors(each, non_blocking) for key, each in state_dict.items()}
        case list():
            return [preload_tensors(each, non_blocking) for each in state_dict]
        case torch.Tensor():
            return state_dict.detach().to("cpu", non_blocking=non_blocking, copy=True)
    return state_dict


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
    # An array of NumPy, which nostall does not need, has a type of this name.
    left, right = (
        dict(enumerate(each))
        if isinstance(each, list | tuple) or type(each).__name__ == "ndarray"
        else each
        for each in (x1, x2)
    )
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return [], [], [] if _is_equal(x1, x2) else [(prefix, type(x1), type(x2))]
    only_left: list[Any] = [(*prefix, key) for key in left if key not in right]
    only_right: list[Any] = [(*prefix, key) for key in right if key not in left]
    mismatch: list[tuple[Any, ...]] = []
    for key in [key for key in left if key in right]:
        inner = diff(left[key], right[key], (*prefix, key))
        only_left += inner[0]
        only_right += inner[1]
        mismatch += inner[2]
    return only_left, only_right, mismatch


def _is_equal(x1: Any, x2: Any) -> bool:
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        return torch.equal(x1.cpu(), x2.cpu())
    try:
        return bool(x1 == x2)
    except (RuntimeError, ValueError):  # of an element-wise comparison
        return False


def main(argv: list[str] | None = None) -> None:
    """Run a script as ``python SCRIPT [ARGUMENT ...]`` does, with the aliases installed.

    Exits with status 2 if there is no script.
    """
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="nostall.nvrx_alias",
        allow_abbrev=False,
        usage="python -m nostall.nvrx_alias SCRIPT [ARGUMENT ...]",
        description="Run a Python script in which imports of"
        " nvidia_resiliency_ext.checkpointing.async_ckpt find nostall.",
    )
    parser.add_argument("script", metavar="SCRIPT")
    script = parser.parse_args(arguments[:1]).script  # the others are the script's
    if not os.path.exists(script):
        parser.exit(2, f"{parser.prog}: {script}: no such file\n")
    install(force=True)
    sys.argv = list(arguments)
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
