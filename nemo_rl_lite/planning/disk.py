"""Predicts the bytes of a run's checkpoints and exported model, and compares them with free disk space."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_lite.checkpoint.resume import CHECKPOINTS
from nemo_rl_lite.checkpoint.store import files_below
from nemo_rl_lite.config.algorithms import moves_reference
from nemo_rl_lite.config.keys import RUN_FOLDER
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.models.shape import ModelShape, published_shape
from nemo_rl_lite.planning.budget import size
from nemo_rl_lite.planning.memory import item_bytes
from nemo_rl_lite.planning.parameters import parameter_count, whole_trained_parameters

# Tolerance for predictions that are too large.
_SLACK = 0.1


@dataclass(frozen=True)
class DiskUse:
    """Bytes of a checkpoint, maximum number of kept checkpoints, and bytes of `hf/`."""

    checkpoint: int
    kept: int
    model: int

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> "DiskUse":
        """Predict the use of a run. A checkpoint has the trained parameters, their float32 copies and the moments, and
        a moving reference policy. Only the distributed optimizer has copies of float32 parameters."""
        options, item, optimizer = config.checkpoint, item_bytes(config), config.policy.megatron_cfg.optimizer
        moments = 8 if optimizer.optimizer == "adam" else 4 if optimizer.sgd_momentum > 0 else 0
        copies = 4 if item < 4 or optimizer.use_distributed_optimizer else 0
        trained = whole_trained_parameters(shape, config.policy.megatron_cfg.peft, on_gpus(config))
        one = trained * (item + copies + moments)
        one += parameter_count(shape) * item if moves_reference(config) else 0
        saves, steps = 0, config.algorithm.max_num_steps
        if options.save_period:
            most = options.keep_newest + options.keep_best
            saves = most if steps is None else min(most, -(-steps // options.save_period))
        return cls(one, saves, parameter_count(shape) * item if options.export_hf_at_end else 0)

    @property
    def total(self) -> int:
        """Bytes of all that is kept, plus one checkpoint that is being written."""
        return (self.kept + (self.kept > 1)) * self.checkpoint + self.model

    def __str__(self) -> str:
        kept = f"{self.kept} are kept" if self.kept > 1 else "one is kept"
        parts = [f"a checkpoint takes {size(self.checkpoint)}, {kept}"] if self.kept else []
        parts += [f"hf/ takes {size(self.model)}"] if self.model else []
        return "; ".join(parts)


def too_little_space(config: Config, folder: Path) -> Iterator[Violation]:
    """Yield a violation if the disk of a run's folder has no room for one checkpoint. The folder need not exist."""
    use, free = _use(config), free_bytes(folder)
    if use is not None and use.kept and free < (1 - _SLACK) * use.checkpoint:
        rule = f"has {size(free)} free, and a checkpoint takes {size(use.checkpoint)}"
        fix = f"free some space, {RUN_FOLDER}=FOLDER on another disk, or checkpoint.save_period=0"
        yield Violation(RUN_FOLDER, str(folder), rule, fix)


def little_space(config: Config, folder: Path) -> Iterator[str]:
    """Yield a note if the disk has no room for all that the run keeps."""
    use, free = _use(config), free_bytes(folder)
    if use is None:
        return
    there = sum(file.stat().st_size for file in files_below(folder / CHECKPOINTS))
    if use.total - there > free:
        keys = "checkpoint.keep_newest and checkpoint.keep_best" if use.kept > 1 else "checkpoint.export_hf_at_end"
        yield f"{folder} has {size(free)} free, and the run needs up to {size(use.total - there)}: {use} ({keys})"


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist."""
    folder = folder.absolute()
    return shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free


def _use(config: Config) -> DiskUse | None:
    """Return the use of a run; None for an unknown architecture."""
    shape = published_shape(config.policy.model_name)
    return None if shape is None else DiskUse.of(config, shape)
