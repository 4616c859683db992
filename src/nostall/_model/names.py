"""Which names of files a checkpoint may refer to."""

from __future__ import annotations

import os
import re

METADATA_SUFFIX = ".metadata"
SHARD_SUFFIX = ".distcp"
"""With which stock DCP's names of shard files end, and ours."""
_GIVEN = re.compile(r"__\d+_\d+(-[0-9a-f]{8})*" + re.escape(SHARD_SUFFIX) + r"\Z")


def is_ours_to_remove(name: str) -> bool:
    """Whether a file that the metadata of a replaced checkpoint names may be removed: metadata can name anything."""
    return name.endswith(SHARD_SUFFIX) and os.sep not in name


def is_given_to_shards(name: str) -> bool:
    """Whether stock DCP or nostall give such names to shard files, with whatever in front: ``__3_0-89abcdef.distcp``."""
    return _GIVEN.search(name) is not None


def is_shard_name(name: str) -> bool:
    """Whether a name is one below the checkpoint directory, and not that of the metadata itself."""
    normal = os.path.normpath(name)
    try:
        encoded = os.fsencode(normal)
    except UnicodeEncodeError:
        return False
    return (
        b"\0" not in encoded
        and not os.path.isabs(normal)
        and normal.split(os.sep)[0] not in (os.curdir, os.pardir)
        and not normal.endswith(METADATA_SUFFIX)
    )
