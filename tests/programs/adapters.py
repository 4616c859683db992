"""What adapters share, on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from nostall.integrations._saves import Saves
from nostall.integrity import is_complete
from nostall.removal import remove_checkpoint


def before_commit(out: Path) -> dict[str, Any]:
    """A function before the commit fails on rank 0; the next save succeeds."""

    def fail() -> None:
        if dist.get_rank() == 0:
            raise OSError("cannot write beside it")

    saves = Saves(remove_checkpoint)
    message = ""
    saves.save({"weight": torch.ones(10)}, str(out / "first"), before_commit=fail)
    try:
        saves.poll(wait=True)
    except (CheckpointException, OSError) as error:
        message = str(error)
    saves.save({"weight": torch.ones(10)}, str(out / "second"))
    saves.close()
    names = ("first", "second")
    return {"message": message, "committed": [name for name in names if is_complete(out / name)]}
