"""Arguments of a manager, checked and brought into one form."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nostall._manager.policies import Better, KeepBest, Policy, require_better
from nostall._storage.destination import place_of, require_possible
from nostall.errors import OptionError
from nostall.options import require_integer


def root_of(root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> str:
    """The place of a root; ``~`` at its beginning is the home directory.

    Raises:
        OptionError: As :func:`place_of`.
    """
    require_possible(root)
    return place_of(os.path.expanduser(root), storage_options)


def require_writer(writer: object) -> None:
    """Require that ``writer`` makes writers.

    Raises:
        OptionError: It cannot be called: it is a writer, for example.
    """
    if not callable(writer):
        raise OptionError(
            f"writer={writer!r:.200} cannot be called",
            hint="pass what makes the writer of a directory, such as"
            " partial(FileSystemWriterAsync, thread_count=4)",
        )


def policies_of(keep: Policy | Iterable[Policy] | None) -> tuple[Policy, ...]:
    """One policy, several or none.

    Raises:
        OptionError: An object is not a policy.
    """
    if keep is None:
        return ()
    policies = tuple(keep) if isinstance(keep, Iterable) else (keep,)
    for policy in policies:
        has_all = hasattr(policy, "keeps") and hasattr(policy, "reads_metrics")
        if isinstance(policy, type) or not has_all:
            raise OptionError(
                f"keep={keep!r:.200} is not possible: {policy!r:.100} is not a policy",
                hint="use KeepLatest(3), KeepBest(1, metric), KeepEvery(steps=1000), a list of"
                " these, or an object with keeps(records) and reads_metrics",
            )
    return policies


def interval_of(save_every: int | timedelta | None) -> int | timedelta | None:
    """Steps or a time between two saves.

    Raises:
        OptionError: It is not positive.
    """
    if save_every is None or (isinstance(save_every, timedelta) and save_every > timedelta(0)):
        return save_every
    try:
        return require_integer("save_every", save_every, at_least=1)
    except OptionError as error:
        hint = f"{error.hint}; or a time, such as datetime.timedelta(minutes=10)"
        raise OptionError(error.message, hint=hint) from None


def better_of(policies: Iterable[Policy], metrics: Mapping[str, Better]) -> dict[str, Better]:
    """Which value of a metric is better: as ``metrics`` says, or as all policies agree.

    Raises:
        OptionError: A mode is unknown; or ``metrics`` is not a mapping.
    """
    if not isinstance(metrics, Mapping):
        raise OptionError(f"metrics={metrics!r:.200} is not possible", hint='use {"loss": "min"}')
    for mode in metrics.values():
        require_better(mode)
    best = [policy for policy in policies if isinstance(policy, KeepBest)]
    modes = {(policy.metric, policy.mode) for policy in best}
    agreed = {name: mode for name, mode in modes if len([m for n, m in modes if n == name]) == 1}
    return {**agreed, **metrics}


def numbers_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as Python numbers, also from NumPy and from tensors of one element.

    Raises:
        OptionError: A value is not a number.
    """
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (ArithmeticError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise OptionError(
            f"metrics={metrics!r:.200} is not possible: {error}", hint='use {"loss": 0.5}'
        ) from error


def require_group(root: str) -> None:
    """Require a process group where a launcher such as torchrun has started several processes.

    Each would take itself for the whole job otherwise, and remove the steps of the others.

    Raises:
        OptionError: ``RANK`` and ``WORLD_SIZE`` are set, the latter to more than 1, and no process
            group is initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and size.isdecimal() and int(size) > 1:
        raise OptionError(
            f"this is RANK={rank} of WORLD_SIZE={size}, and no process group is initialised",
            path=root,
            hint="call torch.distributed.init_process_group() first; or pass alone=True if each"
            " process has a root of its own",
        )


def parts_of(parts: Iterable[Any]) -> tuple[str, ...]:
    """The names of the parts.

    Raises:
        OptionError: They are not strings; a name is not that of a directory, or occurs twice.
    """
    if not isinstance(parts, Iterable):
        raise OptionError(
            f"parts={parts!r:.200} is not possible", hint='use ("model", "optimizer")'
        )
    names = (parts,) if isinstance(parts, str) else tuple(parts)
    for name in names:
        if not isinstance(name, str) or os.sep in name or name.startswith(".") or not name:
            raise OptionError(f"the part {name!r} is not possible", hint="use names of directories")
    if len(set(names)) != len(names):
        raise OptionError(f"parts={names!r} has a name twice", hint="name each part once")
    return names
