"""What a way of loading has to offer to be measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from nostall._bench.workloads import State


class LoadContender(Protocol):
    """A way of loading tensors into tensors that are there already.

    ``write`` is called once for each form, before any load.
    """

    name: str
    description: str
    form: str
    """Name of the files that it reads; contenders of one form read the same ones."""

    def available(self) -> str | None:
        """Why it cannot take part here, or ``None`` if it can."""
        ...

    def write(self, state: State, path: Path) -> None:
        """Save what will be loaded, into a directory that does not exist."""
        ...

    def load(self, path: Path, into: State) -> None:
        """Overwrite the tensors of a state dict: all that were saved, or some of them."""
        ...

    def forget(self) -> None:
        """Drop what is kept from earlier loads, such as metadata; called before each turn."""
        ...


@runtime_checkable
class LoadsRows(Protocol):
    """A contender that can load rows of tensors."""

    def forget(self) -> None:
        """As of :class:`LoadContender`."""
        ...

    def load_rows(self, path: Path, into: dict[str, Tensor], rows: Mapping[str, slice]) -> None:
        """Overwrite tensors, which have the names of saved ones, with rows of those."""
        ...
