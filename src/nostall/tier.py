"""Copies of committed checkpoints: from a local disk to their destination, in the background.

>>> writer = nostall.FileSystemWriterAsync("/lustre/run/step-100", local_staging_dir="/nvme/run")
>>> dcp.save(state_dict, storage_writer=writer)  # committed in /nvme/run/step-100
>>> writer.promotion.result(timeout=600)  # committed in /lustre/run/step-100
>>> nostall.tier.promote("/nvme/run", "/lustre/run")  # what an earlier job has left
"""

from nostall._tier.promotions import Promotion, PromotionStatus, promote, status

__all__ = ["Promotion", "PromotionStatus", "promote", "status"]
