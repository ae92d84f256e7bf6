"""Take the loss of a training step apart by token, from the files of its run.

The run's own loss is evaluated again on the saved rows, micro-batch by micro-batch. It gets the logprobs that the
training pass of each optimizer step had. Shapes: N tokens of all rows, B rows, T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import Batch, TokenRows, episode_numbers, trained_of_episodes
from nemo_rl_lite.losses.interface import Loss
from nemo_rl_lite.policy.score_files import SCORES
from nemo_rl_lite.report.record import ReportError
from nemo_rl_lite.rollout.store import ROLLOUTS, rollout_files, step_of

_SAMPLE = ("problem", "sample")
# Columns of the samples that are the same for all tokens.
_KEPT = (*_SAMPLE, "prompt", "reward", "length_penalty", "advantage", "ending", "prompt_tokens", "source")
_OF_TOKENS = ("token_ids", "generation_logprobs", "token_advantages", "versions", "segments")


@dataclass(frozen=True)
class Trained:
    """The rows that a step trained on."""

    rows: TokenRows
    samples: Mapping[str, Sequence[Any]]
    """Columns of the samples, in order of problem and sample."""
    sample_of_row: np.ndarray
    """[B]."""
    versions: np.ndarray
    """Step of the weights that sampled each token; -1 for other tokens. [N]."""
    known: Mapping[str, np.ndarray]
    """Fields of `Batch` that the policy and other models have computed, [N]."""
    updates: "Updates"


@dataclass(frozen=True)
class Updates:
    """Training passes of rows: U pairs of a row and an optimizer step."""

    rows: np.ndarray
    steps: np.ndarray
    """Number among the optimizer steps of the rollout."""
    micro_batches: np.ndarray
    """Equal for the rows of a micro-batch, in the whole rollout's optimizer step."""
    skipped: np.ndarray
    scores: Mapping[str, Sequence[np.ndarray | None]]
    """`logprobs` and `entropy` of each pass; None for previous logprobs, and for an unknown entropy."""


@dataclass(frozen=True)
class Explained:
    """Tokens' shares of a step's loss, its mean over the optimizer steps that were taken. Arrays are [N]."""

    parts: Mapping[str, np.ndarray]
    """See `TokenShares.parts`."""
    gradient: np.ndarray
    """Sum over the optimizer steps of |d loss / d logprob|: the token's weight in the policy gradient."""
    advantages: np.ndarray
    ratio: np.ndarray
    """The importance ratio that is farthest from 1."""
    weights: np.ndarray
    low: np.ndarray
    """True if the lower bound of the ratio acted in an optimizer step. The next are alike."""
    high: np.ndarray
    truncated: np.ndarray
    dropped: np.ndarray
    losses: Sequence[float]
    """Loss of each optimizer step that was taken."""
    skipped: int
    """Number of optimizer steps that were not taken."""

    @property
    def shares(self) -> np.ndarray:
        return sum(self.parts.values(), np.zeros(len(self.gradient)))


def read_trained(run: Path, step: int, config: Config) -> Trained:
    """Read the rows of a step. Raises ReportError: the run has not saved them all."""
    options = config.algorithm
    if not isinstance(options, GRPOConfig):
        rule = "it needs a run of GRPO or distillation"
        raise ReportError(f"nrl-lite why: {run} has algorithm={options.name}; {rule}")
    table = _sorted(run / ROLLOUTS, f"step-{step:08d}-*train.parquet", [*_KEPT, *_OF_TOKENS], _SAMPLE)
    scores = _sorted(run / SCORES, f"step-{step:08d}-*.parquet", None, (*_SAMPLE, "segment"))
    wanted = options.num_prompts_per_step * options.num_generations_per_prompt
    if table is None:
        there = [step_of(file) for file in rollout_files(run) if file.stem.endswith("train")]
        known = f"it has steps {min(there)} to {max(there)}" if there else "set logger.log_samples=null"
        raise ReportError(f"nrl-lite why: {run} has no samples of step {step}; {known}")
    if table.num_rows != wanted:
        rule = f"has {table.num_rows} of {wanted} samples of step {step}; it needs all (logger.log_samples=null)"
        raise ReportError(f"nrl-lite why: {run} {rule}")
    if scores is None:
        raise ReportError(f"nrl-lite why: {run} has no scores of step {step}")
    samples = {name: table.column(name).to_pylist() for name in _KEPT}
    tokens, ends = _flat(table.column("token_ids"))
    starts = np.concatenate([[0], ends[:-1]])
    segments = table.column("segments").to_pylist()
    counts = [1 if own is None else len(own) for own in segments]
    lengths = [
        length
        for own, start, end in zip(segments, starts, ends, strict=True)
        for length in ([end - start] if own is None else [one["length"] for one in own])
    ]
    is_trained = [
        reward is not None and not (options.overlong_filtering and ending == "length")
        for reward, ending in zip(samples["reward"], samples["ending"], strict=True)
    ]
    versions, mask = np.full(len(tokens), -1, np.int32), np.zeros(len(tokens), bool)
    for runs, start, trained in zip(table.column("versions").to_pylist(), starts, is_trained, strict=True):
        for one in runs:
            own = slice(start + one["start"], start + one["start"] + one["length"])
            versions[own], mask[own] = one["version"], trained
    sample_of_row = np.repeat(np.arange(len(counts)), counts)
    if scores.num_rows != len(lengths):
        raise ReportError(f"nrl-lite why: {run} has scores of {scores.num_rows} of {len(lengths)} rows of step {step}")
    advantages = np.array([0.0 if one is None else one for one in samples["advantage"]])
    shaped = [
        0.0 if reward is None else reward + penalty
        for reward, penalty in zip(samples["reward"], samples["length_penalty"], strict=True)
    ]
    by_token = table.column("token_advantages").null_count < table.num_rows
    known = {
        field: _flat(scores.column(name))[0]
        for name, field in {"policy_logprobs": "previous_logprobs", "reference_logprobs": "reference_logprobs"}.items()
        if not scores.column(name).null_count
    }
    teacher = None if scores.column("teacher_logprobs").null_count else _flat(scores.column("teacher_logprobs"))[0]
    rows = TokenRows(
        np.array(lengths, np.int64),
        tokens,
        mask,
        _flat(table.column("generation_logprobs"))[0],
        None if by_token else advantages[sample_of_row],
        np.where(versions < 0, 0, step - 1 - versions),
        np.array(shaped)[sample_of_row],
        token_advantages=_flat(table.column("token_advantages"))[0] if by_token else None,
        teacher_logprobs=teacher,
        episodes=episode_numbers(counts),
    )
    return Trained(rows, samples, sample_of_row, versions, known, _updates(scores))


def _sorted(folder: Path, pattern: str, columns: list[str] | None, keys: Sequence[str]) -> pa.Table | None:
    """Return the rows of the files, with the number of each row's file; None without files."""
    files = sorted(folder.glob(pattern))
    if not files:
        return None
    try:
        tables = [parquet.read_table(file, columns=columns) for file in files]
    except (OSError, pa.ArrowException) as error:
        raise ReportError(f"nrl-lite why: {error}") from error
    tables = [one.append_column("file", pa.array(np.full(one.num_rows, number))) for number, one in enumerate(tables)]
    return pa.concat_tables(tables).sort_by([(key, "ascending") for key in keys]).combine_chunks()


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of all lists, and where each list ends."""
    lists = column.combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    return lists.flatten().to_numpy(zero_copy_only=False), np.cumsum(lists.value_lengths().to_numpy())


def _updates(scores: pa.Table) -> Updates:
    lists = scores.column("updates").combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    each, counts = lists.flatten(), lists.value_lengths().to_numpy()
    rows = np.repeat(np.arange(len(counts)), counts)
    steps, micro = (each.field(name).to_numpy() for name in ("optimizer_step", "micro_batch"))
    replicas = scores.column("file").to_numpy()[rows]
    found = {name: _arrays(each.field(name)) for name in ("logprobs", "entropy")}
    skipped = each.field("skipped").to_numpy(zero_copy_only=False)
    return Updates(rows, steps, replicas * (micro.max(initial=0) + 1) + micro, skipped, found)


def _arrays(lists: pa.ListArray) -> list[np.ndarray | None]:
    """Return each list as an array; None for null."""
    values, offsets = lists.values.to_numpy(zero_copy_only=False), lists.offsets.to_numpy()
    there = lists.is_valid().to_numpy(zero_copy_only=False)
    each = zip(there, offsets[:-1], offsets[1:], strict=True)
    return [values[start:end] if own else None for own, start, end in each]


def explain(trained: Trained, loss: Loss) -> Explained:
    """Take the loss of a step apart. Raises ReportError: the loss has no token shares, or reads what is not saved."""
    shares_of = getattr(loss, "token_shares", None)
    if shares_of is None:
        raise ReportError(f"nrl-lite why: {type(loss).__name__} has no method token_shares; see losses/interface.py")
    rows, updates, total = trained.rows, trained.updates, len(trained.rows.tokens)
    steps = np.unique(updates.steps)
    taken = [one for one in steps if not updates.skipped[updates.steps == one].any()] or steps.tolist()
    found: dict[str, np.ndarray] = {name: np.zeros(total) for name in ("gradient", "advantages", "weights")}
    found |= {name: np.zeros(total, bool) for name in ("low", "high", "truncated", "dropped")}
    parts, losses, ratio = dict[str, np.ndarray](), [], np.ones(total)
    for step in taken:
        of_step = np.flatnonzero(updates.steps == step)
        counts, whole = loss.counts(rows.select(np.sort(updates.rows[of_step]).tolist())), 0.0
        for own in _groups(of_step, updates.micro_batches[of_step]):
            batch, logprobs_BT, places, inside_BT = _micro_batch(trained, own)
            try:
                # Clip-Cov draws tokens.
                torch.manual_seed(0)
                value, _ = loss(logprobs_BT.requires_grad_(), batch, counts)
                (gradient_BT,) = torch.autograd.grad(value, logprobs_BT)
                torch.manual_seed(0)
                shares = shares_of(logprobs_BT.detach(), batch, counts)
            except ValueError as error:
                raise ReportError(f"nrl-lite why: the files do not have all that the loss reads: {error}") from error

            def flat(values_BT: Tensor, inside: np.ndarray = inside_BT.numpy()) -> np.ndarray:  # noqa: B008
                return values_BT.numpy()[inside]

            whole += float(value.detach())
            for name, values_BT in shares.parts.items():
                parts.setdefault(name, np.zeros(total))[places] += flat(values_BT) / len(taken)
            found["gradient"][places] += np.abs(flat(gradient_BT)) / len(taken)
            found["advantages"][places], found["weights"][places] = flat(shares.advantages), flat(shares.weights)
            for name in ("low", "high", "truncated", "dropped"):
                found[name][places] |= flat(getattr(shares, name)) & trained.rows.mask[places]
            now = flat(shares.ratio)
            farther = np.abs(np.log(np.maximum(now, 1e-30))) > np.abs(np.log(ratio[places]))
            ratio[places] = np.where(farther & trained.rows.mask[places], np.maximum(now, 1e-30), ratio[places])
        losses.append(whole)
    return Explained(parts, ratio=ratio, losses=losses, skipped=len(steps) - len(taken), **found)


def _groups(index: np.ndarray, keys: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices with each key."""
    order = np.argsort(keys, kind="stable")
    yield from np.split(index[order], np.flatnonzero(np.diff(keys[order])) + 1)


def _micro_batch(trained: Trained, updates: np.ndarray) -> tuple[Batch, Tensor, np.ndarray, Tensor]:
    """Return a micro-batch, the trained policy's logprobs [B, T], the places of its tokens in all, and where they are
    in [B, T]. `updates`: numbers of its training passes."""
    rows, index = trained.rows, trained.updates.rows[updates]
    batch = Batch.padded(rows.select(index.tolist()))
    places = np.concatenate([np.arange(rows.ends[row] - rows.lengths[row], rows.ends[row]) for row in index])
    inside_BT = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]

    def padded(values: np.ndarray) -> Tensor:
        values_BT = torch.zeros(inside_BT.shape)
        values_BT[inside_BT] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
        return values_BT

    known = {name: values[places] for name, values in trained.known.items()}
    scores = {name: [own[update] for update in updates] for name, own in trained.updates.scores.items()}
    previous = np.split(known["previous_logprobs"], np.cumsum(rows.lengths[index])[:-1])
    logprobs = [old if new is None else new for old, new in zip(previous, scores["logprobs"], strict=True)]
    if entropy := [one for one in scores["entropy"] if one is not None]:
        known["entropy"] = np.concatenate(entropy)
    if rows.episodes is not None:
        tokens, owners = trained_of_episodes(rows)
        batch = replace(batch, episode_tokens=torch.tensor(tokens[owners[index]], dtype=torch.float32))
    batch = replace(batch, **{name: padded(own) for name, own in known.items()})
    return batch, padded(np.concatenate(logprobs)), places, inside_BT
