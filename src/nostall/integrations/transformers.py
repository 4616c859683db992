"""The Hugging Face ``Trainer``: sharded checkpoints that are written while training continues.

In place of ``transformers.Trainer``, or before a subclass of it::

    trainer = NostallTrainer(model=model, args=arguments, train_dataset=data)


    class Tuner(NostallTrainer, SFTTrainer): ...
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from nostall.integrations._saves import DirectorySaves, missing

__all__ = ["NostallTrainer"]

_log = logging.getLogger("nostall")

try:
    import_module("accelerate")
    _trainer = import_module("transformers.trainer")
    _checkpoints = import_module("transformers.trainer_utils")
    from nostall.integrations.accelerate import saves_shards, shards_on_device
except ImportError as error:
    raise missing("transformers", error, also="accelerate") from None


class NostallTrainer(_trainer.Trainer):  # type: ignore[misc,name-defined]  # no types
    """``Trainer`` with sharded saves of FSDP2 in the background.

    A save copies model and optimizer. The directory ``checkpoint-N`` appears when all of it is
    written on all ranks, at the start of a later training step or at the end of training. Then
    ``save_total_limit`` is applied, which keeps this checkpoint and the best one. A failed save
    raises torch's ``CheckpointException`` on every rank, at one of these places. Other states, and
    all with ``push_to_hub``, are saved by the ``Trainer``.

    Args:
        writer_options: Options of :class:`nostall.FileSystemWriterAsync`.
    """

    def __init__(
        self, *args: Any, writer_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._directories = DirectorySaves(writer_options)
        self._names: tuple[str, str] | None = None
        """During a save: the directory that is written, and the one that it will be."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and commit all saves, also after an exception; as ``Trainer.train``."""
        self._directories.recover(self.args.output_dir, self.args.output_dir)
        saves = self.args.save_strategy != "no" and self.is_world_process_zero()
        if saves and not self._is_ours():
            _log.warning(
                "NostallTrainer saves as the Trainer does, while training waits: only FSDP2 with"
                " SHARDED_STATE_DICT, without push_to_hub and save_on_each_node, is saved in the"
                " background"
            )
        try:
            result = super().train(*args, **kwargs)
        except BaseException as error:  # raised again
            self._directories.close(error)
            raise
        self._directories.close()
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Commit the saves that are done on all ranks; as ``Trainer.training_step``."""
        self._directories.poll()
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self._is_ours():
            super()._save_checkpoint(model, trial)
            return
        run = self._get_output_dir(trial)
        path = os.path.join(run, f"{_checkpoints.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        protected = [path]
        saving = self._directories.save(path, run, then=lambda: self._rotate(run, protected))
        with saving as directory, shards_on_device(self.accelerator):
            self._names = directory, path
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._names = None
            # As of this save: what is the best one later may not be committed when this one is.
            protected += filter(None, [self.state.best_model_checkpoint])

    def _is_ours(self) -> bool:
        apart = self.args.push_to_hub or self.args.save_on_each_node
        return saves_shards(self.accelerator) and not apart

    def _get_output_dir(self, trial: Any) -> str:
        if self._names is not None:
            return os.path.dirname(self._names[0])
        run: str = super()._get_output_dir(trial)
        return run

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # Before this call the best checkpoint is named, after it the name is written.
        if self._names is not None and self.state.best_model_checkpoint == self._names[0]:
            self.state.best_model_checkpoint = self._names[1]
        super()._save_optimizer_and_scheduler(output_dir)

    def _rotate(self, run: str, protected: Sequence[str]) -> None:
        keep = self.args.save_total_limit
        if keep is not None and keep > 0:
            # In the order in which they were written, which is the Trainer's.
            paths = _checkpoints.sort_checkpoints(run, use_mtime=True)
            self._directories.rotate(paths, run, keep=keep, protected=protected)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._directories.poll(wait=True)  # the best checkpoint is loaded here
        return super()._finalize_training(*args, **kwargs)
