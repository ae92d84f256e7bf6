"""Find a run's start: its model, or a checkpoint. Imports nothing heavy."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_lite.checkpoint.store import POLICY, RECORD, Checkpoint, CheckpointStore, Retention, checked, has_any
from nemo_rl_lite.config.algorithms import has_teacher
from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, Violation

CHECKPOINTS = "checkpoints"
# A run cannot resume from a checkpoint with other values of these keys.
_FIXED = ("algorithm.name", "policy.megatron_cfg.peft", "policy.megatron_cfg.optimizer.optimizer")
# Float32 parameters have no separate main copies. Only megatron-core's distributed optimizer has the same format with
# and without main copies.
_PRECISION, _DISTRIBUTED = "policy.precision", "policy.megatron_cfg.optimizer.use_distributed_optimizer"
# Sections that do not affect results.
_FREE = ("run_name", "logger", "checkpoint", "cluster")


@dataclass(frozen=True)
class Start:
    """Start of a run: after `steps`, from the policy's state in the folder `policy` (None: a new run)."""

    steps: int = 0
    policy: Path | None = None
    changes: tuple[str, ...] = ()
    """One line for each key that differs from the saved configuration."""
    rollouts: Mapping[str, Any] = field(default_factory=dict)
    """Saved state of the source of rollouts."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """See `data_identity`; may be empty."""

    @property
    def folder(self) -> Path | None:
        """Return the checkpoint's folder."""
        return None if self.policy is None else self.policy.parent

    def lines(self) -> Iterator[str]:
        """Yield lines for the terminal; none for a new run."""
        if self.steps:
            yield f"resuming after step {self.steps}, from {self.policy}"
        for change in self.changes:
            yield f"changed since then  {change}"

    def data_lines(self, now: Mapping[str, Any]) -> Iterator[str]:
        """Yield lines for the terminal if the training or validation rows `now` differ from the checkpoint's."""
        then, now = dict(self.data), dict(now)
        held_out_then, held_out_now = (one.pop("validation", None) for one in (then, now))
        if then and then != now:
            counts = f"{then['rows']:,} then, {now['rows']:,} now" if now else "rows then, a generated task now"
            yield (
                f"changed since then  the training rows ({counts}): step {self.steps + 1} continues at its position in "
                "their new order, so this epoch may repeat or skip rows"
            )
        if held_out_then and held_out_now and held_out_then != held_out_now:
            counts = f"{held_out_then['rows']:,} then, {held_out_now['rows']:,} now"
            yield (
                f"changed since then  the held-out rows ({counts}): validations and best checkpoints before and after "
                f"step {self.steps} are not comparable"
            )


def checkpoint_store(config: Config, run_folder: Path) -> CheckpointStore:
    """Return the store of the run's own checkpoints."""
    options, algorithm = config.checkpoint, config.algorithm
    retention = Retention(options.keep_newest, options.keep_best, algorithm.val_metric, algorithm.higher_is_better)
    return CheckpointStore(run_folder / CHECKPOINTS, retention)


def find_start(
    config: Config,
    whole_config: Mapping[str, Any],
    run_folder: Path,
    busy: Callable[[str], AbstractContextManager] = nullcontext,
) -> Start:
    """Return the newest checkpoint in the run's folder, else that of `checkpoint.resume_from`, else the model.

    `busy` shows that a long operation is running.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: `checkpoint.resume_from` has no checkpoint, or one that this run cannot resume from.
    """
    store, named = checkpoint_store(config, run_folder), config.checkpoint.resume_from
    if not has_any(store.folder) and named is None:
        return Start()
    with busy("verifying the checkpoint"):
        found = store.newest()
        if found is None and named is not None:
            found = locate(Path(named))
    if found is None:
        if named is None:
            return Start()
        fix = "the folder of a run, or of one checkpoint (.../checkpoints/step-00000010)"
        raise ConfigError([Violation("checkpoint.resume_from", named, "has no complete checkpoint", fix)])
    saved = found.record.get("config", {})
    # Without a teacher its keys, which default to the policy's, have no effect.
    changes = changed(saved, whole_config, _FREE if has_teacher(config) else (*_FREE, "teacher"))
    # A checkpoint has the values that `auto` resolved to.
    changes = {key: (before, now) for key, (before, now) in changes.items() if now != "auto"}
    before_all = dict(flatten(saved))
    fixed = _fixed(before_all, dict(flatten(whole_config)))
    wrong = [
        Violation(key, now, f"{found.path} was saved with {before!r}", "the saved value, or another folder")
        for key, (before, now) in changes.items()
        # A key that the saved configuration lacks is newer than the checkpoint.
        if _is_within(key, fixed) and key in before_all
    ]
    wrong += _adapters_of_another_model(config, changes, found.path)
    last, key = config.algorithm.max_num_steps, "algorithm.max_num_steps"
    # A run may resume from its own checkpoint of the last step, because it may have exited before the final export.
    if last is not None and found.step >= last + (named is None or has_any(store.folder)):
        rule = f"{found.path} has taken {found.step} steps already"
        wrong.append(Violation(key, last, rule, f"{key}={found.step + 10}, or another number above {found.step}"))
    if wrong:
        raise ConfigError(wrong)
    lines = tuple(f"{key}: {before!r} -> {now!r}" for key, (before, now) in changes.items())
    return Start(found.step, found.path / POLICY, lines, found.record.get("rollouts", {}), found.record.get("data", {}))


def _adapters_of_another_model(
    config: Config, changes: Mapping[str, tuple[Any, Any]], checkpoint: Path
) -> Iterator[Violation]:
    """Yield a violation if the checkpoint has only LoRA adapters, and those of a different model."""
    key = "policy.model_name"
    before, now = changes.get(key, (None, None))
    if not config.policy.megatron_cfg.peft.enabled or before is None:
        return
    if Path(before).expanduser().resolve() != Path(now).expanduser().resolve():
        rule = f"{checkpoint} has LoRA adapters of {before!r}, and no other weights"
        fix = f"{key}={before}, or another checkpoint; if that model was moved, make a link at its old path"
        yield Violation(key, now, rule, fix)


def _fixed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return keys that must have the checkpoint's values, from the leaves of both configurations."""
    by_parameter = saved.get(_DISTRIBUTED) and now.get(_DISTRIBUTED)
    return _FIXED if by_parameter else (*_FIXED, _PRECISION)


def changed(
    before: Mapping[str, Any], now: Mapping[str, Any], ignored: tuple[str, ...] = _FREE
) -> dict[str, tuple[Any, Any]]:
    """Return the values, before and now, of keys that differ between two configurations, outside `ignored`."""
    old, new = dict(flatten(before)), dict(flatten(now))
    keys = [key for key in sorted(old.keys() | new.keys()) if not _is_within(key, ignored)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def locate(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder, or the newest one of the run there. Raises CheckpointError: it is damaged."""
    path = path.expanduser().resolve()
    if (path / RECORD).exists():
        return checked(path)
    return CheckpointStore(path / CHECKPOINTS).newest()


def checkpoints_around(folder: Path) -> Path | None:
    """Return the folder of checkpoints that `folder` is or lies in, or None."""
    for place in (folder, *folder.parents):
        if (place / RECORD).exists():
            return place.parent
        if place.name == CHECKPOINTS and has_any(place):
            return place
    return None


def _is_within(key: str, sections: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)
