"""Counts of what the thread that trains does for nostall's saves in a framework."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from nostall._save import decide

_WITH_CONTENT = ("all_gather", "broadcast", "gather", "scatter")


@contextmanager
def work_for_saves() -> Iterator[Counter[str]]:
    """Count what this thread, and nobody else, gathers, pickles and publishes for nostall."""
    trains, done = threading.current_thread(), Counter[str]()

    def counting(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            if threading.current_thread() is trains and caller.startswith("nostall."):
                done[what] += 1
            return original(*args, **kwargs)

        return call

    counted = [(dist, name, name) for name in _WITH_CONTENT]
    counted += [(decide, "publication_of", "pickle"), (decide, "publish", "publish")]
    with ExitStack() as patched:
        for module, name, what in counted:
            original = getattr(module, name)
            patched.enter_context(patch.object(module, name, counting(what, original)))
        yield done


class Periods:
    """Periods of a training loop, each with what its thread did for nostall's saves.

    They begin with these steps or epochs; each ends with the next, or with :meth:`close`.
    """

    def __init__(self, *starts: int) -> None:
        self._starts = starts
        self._period = ExitStack()
        self._done: list[Counter[str]] = []

    def reach(self, step: int) -> None:
        if step in self._starts:
            self._period.close()
            self._done.append(self._period.enter_context(work_for_saves()))

    def close(self) -> list[dict[str, int]]:
        self._period.close()
        return list(map(dict, self._done))
