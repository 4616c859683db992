"""Whether a run fits into memory: asked before anything is allocated.

A machine without room would swap, or end the run or another process. What a run holds at its peak
is added up from copies of the state:

* Saves: the state; two for the limits of the machine; and one for each contender that takes part:
  all are prepared for the rounds together, and most keep the memory of their last snapshot. A run
  with one contender was measured to take 4.0 times the bytes of its state.
* Loads: what was saved, what is loaded into, two for the limits, and one on the way; 4.8 measured.
* Restarts: what is loaded into, what it is compared with, and one on the way.

What Python and torch take does not grow with the state.
"""

from __future__ import annotations

from nostall._bench.quantities import format_nbytes
from nostall._memory.available import available_nbytes

_COPIES_OF_SAVES = 3
_COPIES_OF_LOADS = 5
_COPIES_OF_RESTARTS = 3


def nbytes_of_saves(nbytes: int, contenders: int) -> int:
    """Bytes that a rank needs to measure saves.

    Args:
        nbytes: Bytes of its state.
        contenders: How many take part.
    """
    return nbytes * (_COPIES_OF_SAVES + contenders)


def nbytes_of_loads(nbytes: int) -> int:
    """Bytes that a process needs to measure loads."""
    return nbytes * _COPIES_OF_LOADS


def nbytes_of_restarts(nbytes: int) -> int:
    """Bytes that a process needs to measure restarts."""
    return nbytes * _COPIES_OF_RESTARTS


def why_no_room(needed: int, *, root: str = "/") -> str | None:
    """Why a run does not fit into memory; ``None`` if it does.

    Args:
        needed: Bytes, of all ranks on this machine.
        root: As for :func:`nostall._memory.available.available_nbytes`.
    """
    available = available_nbytes(root=root)
    if needed <= available:
        return None
    return (
        f"this run needs about {format_nbytes(needed)} of memory, and {format_nbytes(available)}"
        " are available; pass smaller --bytes, or, to measure saves, fewer"
        " --contenders"
    )


def require_room(needed: int) -> None:
    """Require that a run fits into memory.

    Raises:
        ValueError: It does not, with what is needed and what is there.
    """
    why = why_no_room(needed)
    if why is not None:
        raise ValueError(why)
