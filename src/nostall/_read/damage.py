"""The error for files that do not hold what the metadata says."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nostall._model.wording import some
from nostall._read.plan import Wanted
from nostall.errors import DamagedCheckpointError

_NAMED = 3
"""How many items an error names."""


def damaged(what: str, path: str, items: Sequence[Wanted]) -> DamagedCheckpointError:
    """An error that names the file and the first of the items that cannot be loaded."""
    names = some([each.name for each in items], _NAMED)
    return DamagedCheckpointError(
        f"{what} (items {names})",
        phase="read",
        path=path,
        hint=f"`nostall verify {os.path.dirname(path)}` lists all damage; load another checkpoint",
    )


def missing(path: str, items: Sequence[Wanted]) -> DamagedCheckpointError:
    """The error for a file that does not exist."""
    return damaged("the file is missing", path, items)


def too_short(nbytes: int, path: str, items: Sequence[Wanted]) -> DamagedCheckpointError:
    """The error for a file that ends before these items do."""
    end = max(each.end for each in items)
    return damaged(f"the file has {nbytes} bytes, its items end at {end}", path, items)
