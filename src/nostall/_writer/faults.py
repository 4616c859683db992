"""Points of a save at which tests let it fail, die or stop.

Points are ``start``, ``open``, ``chunk``, ``fsync`` and ``report``, in the trainer ``stage``, and
in the coordinator ``commit`` and ``publish``.
"""

from __future__ import annotations

import pickle
from typing import Any


class Faults:
    """Faults that tests have asked for in one save; without cost if there are none.

    Args:
        pickled: Objects of tests with a method of the form of :meth:`at`; empty for none.
    """

    def __init__(self, pickled: bytes) -> None:
        self._faults: tuple[Any, ...] = pickle.loads(pickled) if pickled else ()

    def at(self, point: str, file: str = "") -> None:
        """Pass a named point of a file; raises what a test has asked for."""
        for fault in self._faults:
            fault.at(point, file)
