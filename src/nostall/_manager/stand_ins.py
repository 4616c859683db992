"""Stand-ins for what a program lacks when it unpickles a rank's own content.

It may restore a part of a step, and lack tensors and classes of the others. What it asks for must
not contain a stand-in.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from nostall.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """In place of a value that contains a stand-in."""

    why: OptionError


class OwnUnpickler(pickle.Unpickler):
    """Puts loaded tensors into their places; those of keys that are left out are missing."""

    def __init__(self, stream: io.BytesIO, tensors: Mapping[str, Any]) -> None:
        super().__init__(stream)
        self._tensors = tensors
        self.missing: dict[str, torch.Tensor] = {}
        """What stands for them, by name."""
        self.absent: dict[str, type[_Absent]] = {}
        """What stands for classes that cannot be imported, by name."""

    def persistent_load(self, name: Any) -> Any:
        tensor = self._tensors.get(name)
        return self.missing.setdefault(name, torch.empty(0)) if tensor is None else tensor

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):  # such as a class of the script that saved the step
            absent = f"{module}.{name}"
            return self.absent.setdefault(absent, type(absent, (_Absent,), {}))


class _Absent:
    """Stands for an object of a class that cannot be imported, whatever its pickle does to it."""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None: ...

    def _take(self, *_: object, **__: object) -> None: ...

    __setstate__ = __setitem__ = append = extend = add = update = _take


def found_in(content: object, unpickler: OwnUnpickler) -> _Finder:
    """What stands for something else in an object."""
    finder = _Finder(unpickler)
    finder.dump(content)
    return finder


class _Finder(pickle.Pickler):
    def __init__(self, unpickler: OwnUnpickler) -> None:
        super().__init__(io.BytesIO())
        self._names = {id(tensor): name for name, tensor in unpickler.missing.items()}
        self.missing: set[str] = set()
        """Names of tensors."""
        self.absent: set[str] = set()
        """Names of classes."""

    def persistent_id(self, value: Any) -> str | None:
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, _Absent):
            self.absent.add(kind.__name__)
        elif not isinstance(value, torch.Tensor):
            return None
        elif id(value) in self._names:
            self.missing.add(self._names[id(value)])
        return ""  # a tensor's content is of no interest
