"""Copies of committed checkpoints: from a local disk to their destination, in the background.

>>> writer = nostall.FileSystemWriterAsync("/lustre/run/step-100", local_staging_dir="/nvme/run")
>>> dcp.save(state_dict, storage_writer=writer)  # committed in /nvme/run/step-100
>>> writer.promotion.result(timeout=600)  # committed in /lustre/run/step-100
>>> nostall.tier.promote("/nvme/run", "/lustre/run")  # what an earlier job has left
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nostall.tier._promotions import Promotion as Promotion
    from nostall.tier._promotions import PromotionStatus as PromotionStatus
    from nostall.tier._promotions import promote as promote
    from nostall.tier._promotions import status as status

__all__ = ["Promotion", "PromotionStatus", "promote", "status"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:  # the process that copies imports none of them
        if name in __all__:
            return getattr(import_module("nostall.tier._promotions"), name)
        raise AttributeError(f"module 'nostall.tier' has no attribute {name!r}")
