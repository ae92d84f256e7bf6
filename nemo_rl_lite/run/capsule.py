"""Run capsule: one file with which the first steps of a run can be repeated and compared.

A capsule is made from the files of a run's folder. It has the configuration, command, environment, code changes and
data digests, a fingerprint of each step, and some whole samples. `compare` orders differences as the run computes:
prompts, tokens, the engine's logprobs, rewards, advantages, the policy's logprobs, loss, gradient norm, weights.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.environment import (
    CHANGES_FILE,
    COMMAND_FILE,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
)
from nemo_rl_lite.observability.runs import read_json
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.report.record import metrics_by_step
from nemo_rl_lite.rollout.store import read_rollout, rollout_files, step_of

CAPSULE_FILE = "capsule.json"
_FORMAT = 1
# Columns of `rollouts/` and `scores/` in the order of computation, and what they are called.
_COLUMNS = {
    "prompt_ids": "prompt",
    "token_ids": "tokens",
    "generation_logprobs": "engine's logprobs",
    "reward": "reward",
    "advantage": "advantage",
    "policy_logprobs": "policy's logprobs",
}
_ARRAYS = {"prompt_ids": np.int32, "token_ids": np.int32} | dict.fromkeys(
    ("generation_logprobs", "policy_logprobs"), np.float32
)
# Metrics of a step in the order of computation, and what they are called.
_METRICS = {
    "train/total_num_tokens": "number of tokens",
    "train/loss": "loss",
    "train/grad_norm": "gradient norm",
    "train/lr": "learning rate",
    "refit/weights_checksum": "checksum of the weights",
}
_VALIDATION = "validation/"
WEIGHTS = "weights"


class CapsuleError(LauncherError):
    """A capsule cannot be made or read. The message names the file and the cause."""

    exit_status = 2


@dataclass(frozen=True)
class Difference:
    """Difference in a step: `count` of `total` samples or tensors, or one value."""

    step: int
    what: str
    first: str
    """The first place that differs, and both values."""
    count: int = 1
    total: int = 1

    def __str__(self) -> str:
        many = f" ({self.count} of {self.total} differ)" if self.total > 1 else ""
        return f"step {self.step}: {self.what}{self.first}{many}"


def make(folder: Path, steps: int, samples: int) -> dict[str, Any]:
    """Return the capsule of the first `steps` steps of a run, with `samples` whole samples per step.

    Raises:
        CapsuleError: the folder has no configuration or no complete step.
    """
    config, metrics = read_json(folder / CONFIG_FILE), metrics_by_step(folder)
    if not config:
        raise CapsuleError(f"{folder} has no readable {CONFIG_FILE}: name the folder of a run")
    trained = [step for step, values in metrics.items() if "train/loss" in values]
    if not trained:
        raise CapsuleError(f"{folder} has no complete step in {METRICS_FILE}")
    # A run with checkpoint.resume_from begins at a later step.
    first = min(trained)
    last = min(max(trained), first + steps - 1)
    environment = read_json(folder / ENVIRONMENT_FILE)
    changes = folder / CHANGES_FILE
    return {
        "format": _FORMAT,
        "run": str(folder.resolve()),
        "command": _last_line(folder / COMMAND_FILE),
        "config": config,
        "environment": {name: value for name, value in environment.items() if name not in ("data", "host")},
        "data": environment.get("data", {}),
        "changes": changes.read_text() if changes.exists() else "",
        "steps": [_fingerprint(folder, step, metrics.get(step, {}), samples) for step in range(first - 1, last + 1)],
        # hf/ has the weights of the last step.
        "weights": _tensor_digests(folder / "hf") if last == max(trained) else {},
    }


def read(file: Path) -> dict[str, Any]:
    """Return the capsule in a file. Raises CapsuleError."""
    if not file.is_file():
        raise CapsuleError(f"{file} does not exist, or is a folder; nrl-lite capsule RUN writes RUN/{CAPSULE_FILE}")
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CapsuleError(f"{file} is not a capsule ({error}); nrl-lite capsule RUN writes one") from None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CapsuleError(f"{file} is not a capsule of this version; nrl-lite capsule RUN writes one")
    return found


def to_repeat(config: Config, capsule: Mapping[str, Any]) -> Config:
    """Return the configuration of a capsule's run without checkpoints, trackers and pushes, which change no result."""
    logger, saves = config.logger, config.checkpoint
    logger = replace(logger, wandb_enabled=False, tensorboard_enabled=False, mlflow_enabled=False, plots=False)
    saves = replace(saves, save_period=0, push_to_hub=None, export_hf_at_end=bool(capsule["weights"]))
    return replace(config, logger=logger, checkpoint=saves)


def surroundings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference of configuration, versions, code, data and machine."""
    same = ("logger.", "checkpoint.", "run_name")
    kept = [{name: one[name] for name in ("config", "data", "environment")} for one in (then, now)]
    before, after = (dict(flatten(json.loads(json.dumps(one)))) for one in kept)
    lines = [
        f"{key.partition('.')[2]}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in [*before, *(key for key in after if key not in before)]
        if before.get(key) != after.get(key) and not key.partition(".")[2].startswith(same)
    ]
    return lines + ["the uncommitted changes of the working directory"] * (then["changes"] != now["changes"])


def compare(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between two capsules in the steps of the first one, in the order of computation."""
    found, repeated = list[Difference](), {one["step"]: one for one in now["steps"]}
    for one in then["steps"]:
        step = one["step"]
        if (other := repeated.get(step)) is None:
            found.append(Difference(step, "the step", " was not repeated"))
            continue
        found += _compare_samples(step, "train", one, other)
        found += _compare_metrics(step, one["metrics"], other["metrics"], _METRICS)
        found += _compare_samples(step, "validation", one, other)
        own = {name: name for name in one["metrics"] if name.startswith(_VALIDATION) and name in other["metrics"]}
        found += _compare_metrics(step, one["metrics"], other["metrics"], own)
    if then["weights"] and now["weights"]:
        names = [*then["weights"], *(name for name in now["weights"] if name not in then["weights"])]
        unlike = [name for name in names if then["weights"].get(name) != now["weights"].get(name)]
        if unlike:
            found.append(Difference(then["steps"][-1]["step"], WEIGHTS, f" of {unlike[0]}", len(unlike), len(names)))
    return found


def _compare_samples(step: int, split: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    # A rerun may validate after its last step, where the run did not.
    if split not in then or split not in now:
        return
    pairs = list(zip(then[split], now[split], strict=False))
    if len(then[split]) != len(now[split]):
        yield Difference(step, f"number of {split} samples", f": {len(now[split])}, was {len(then[split])}")
    for column, what in _COLUMNS.items():
        unlike = [(one, other) for one, other in pairs if one[column] != other[column]]
        if unlike:
            one, other = unlike[0]
            place = f" of {split} problem {one['problem']}, sample {one['sample']}{_detail(column, one, other)}"
            yield Difference(step, what, place, len(unlike), len(pairs))


def _detail(column: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return both values. Of arrays: the sums, or the first entry that differs if both capsules have the sample."""
    was, value = (sample.get("whole", {}).get(column) for sample in (one, other))
    if column not in _ARRAYS or None in (one[column], other[column]):
        return f": {other[column]}, was {one[column]}"
    if was is None or value is None:
        return f": sum {other[column]['sum']}, was {one[column]['sum']}"
    place = next((at for at, both in enumerate(zip(was, value, strict=False)) if both[0] != both[1]), None)
    if place is None:
        return f": {len(value)} tokens, was {len(was)}"
    return f": {value[place]} at token {place}, was {was[place]}"


def _compare_metrics(
    step: int, then: Mapping[str, float], now: Mapping[str, float], names: Mapping[str, str]
) -> Iterator[Difference]:
    for name, what in names.items():
        # As text, so that NaN equals NaN.
        if name in then and repr(then[name]) != repr(now.get(name)):
            yield Difference(step, what, f": {now.get(name)}, was {then[name]}")


def _fingerprint(folder: Path, step: int, metrics: Mapping[str, float | None], samples: int) -> dict[str, Any]:
    """Return the compared metrics of a step, and its samples by split."""
    kept = {name: value for name, value in metrics.items() if name in _METRICS or name.startswith(_VALIDATION)}
    found: dict[str, Any] = {"step": step, "metrics": kept}
    for file in rollout_files(folder):
        if step_of(file) == step:
            rows = read_rollout(file, tokens=True)
            split = file.stem.rpartition("-")[2]
            found[split] = [_sample(row, whole=index < samples) for index, row in enumerate(rows)]
    return found


def _sample(row: dict[str, Any], whole: bool) -> dict[str, Any]:
    """Return digests and values of a sample; with `whole` also its arrays and texts."""
    row = row | {"prompt_ids": row["token_ids"][: row["prompt_tokens"]]}
    sample = {name: row[name] for name in ("problem", "sample")}
    for column in _COLUMNS:
        value = row.get(column)
        if column in _ARRAYS and value is not None:
            array = np.asarray(value, _ARRAYS[column])
            value = {"digest": _digest(array), "sum": float(array.sum(dtype=np.float64))}
        sample[column] = value
    if whole:
        texts = {name: row[name] for name in ("prompt", "response", "answer")}
        sample["whole"] = texts | {name: row.get(name) for name in _ARRAYS}
    return sample


def _digest(values: np.ndarray) -> str:
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()


def _tensor_digests(folder: Path) -> dict[str, str]:
    """Return a digest of each tensor of a Hugging Face folder; empty if there is none."""
    import torch
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = _digest(tensors.get_tensor(name).view(-1).contiguous().view(torch.uint8).numpy())
    return found


def _last_line(file: Path) -> str:
    """Return the command of the last start."""
    return file.read_text().splitlines()[-1] if file.exists() else ""
