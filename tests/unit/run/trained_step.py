"""A step in a run's folder, as training leaves it: rollouts, scores of two replicas, and the logged loss."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import make_loss, mean_of_steps, summary
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.policy.score_files import SCORES, ScoreFile, Update, write_scores
from nemo_rl_lite.rollout.sampler import shape_rewards
from nemo_rl_lite.rollout.store import RolloutFiles
from nemo_rl_lite.run.folder import write_start
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.observability.rollouts import make_rollout

STEP, PROMPTS, SAMPLES, PASSES = 3, 2, 4, 2
SIZES = [f"algorithm.num_prompts_per_step={PROMPTS}", f"algorithm.num_generations_per_prompt={SAMPLES}"]
# Two optimizer steps of four rows, on two replicas with two micro-batches each: a row.
SHARES = [[0, 1, 4, 5], [3, 2, 7, 6]]


def make_trained_step(folder: Path, *overrides: str) -> Path:
    """A run with one step of two passes, whose second optimizer step of the second pass was skipped."""
    folder.mkdir(parents=True)
    config = compose_config([*SIZES, *overrides])
    options, random = config.options(GRPOConfig), torch.Generator().manual_seed(1)
    write_start(folder, dataclasses.asdict(config), "nrl-lite train")
    rewards = [1.0, 0.0, None, 1.0, 0.0, 0.0, 1.0, 1.0]
    rollout = make_rollout([f"text {number}" for number in range(PROMPTS * SAMPLES)], rewards, samples=SAMPLES)
    for number, episode in enumerate(rollout.episodes):
        start, turn = episode.turns[0]
        tokens = np.arange(2, 5 + number % 4, dtype=np.int32)
        logprobs = -torch.rand(len(tokens), generator=random).numpy() * 3
        versions = ((STEP - 2, 2), (STEP - 1, len(tokens) - 2))
        episode.turns[0] = start, replace(turn, tokens=tokens, logprobs=logprobs, versions=versions)
        episode.tokens[start:] = tokens.tolist()
        episode.ending = "length" if number == 4 else "stop"
    shape_rewards(rollout, options, 8, {})
    rollout.advantages = torch.randn(len(rewards), generator=random, dtype=torch.float64).tolist()
    rows, loss = rollout.rows(rollout.advantages, STEP - 1), make_loss(options)
    whole = Batch.padded(rows)

    def noise(scale: float) -> torch.Tensor:
        return whole.generation_logprobs + scale * torch.randn(whole.mask.shape, generator=random)

    whole = replace(whole, previous_logprobs=noise(0.3), reference_logprobs=noise(0.5))
    steps, updates = [], [list[Update](), list[Update]()]
    for number in range(2 * PASSES):
        place, metrics = slice(2 * (number % 2), 2 * (number % 2) + 2), []
        counts = loss.counts(rows[2 * place.start : 2 * place.start + 4])
        skipped = number == 3
        logprobs_BT = whole.previous_logprobs if number == 0 else noise(0.4)
        entropy_BT = torch.rand(whole.mask.shape, generator=random)
        for share, own in zip(SHARES, updates, strict=True):
            index = share[place]
            for row in index:
                micro = replace(whole.rows(torch.tensor([row])), entropy=entropy_BT[[row]])
                metrics.append({name: float(one) for name, one in loss(logprobs_BT[[row]], micro, counts)[1].items()})
            scores = {"logprobs": logprobs_BT[index], "entropy": entropy_BT[index]}
            own.append(Update(place, np.arange(2), scores, skipped))
        steps.append(summary(loss, metrics) | {"skipped_steps": float(skipped)})
    target = ScoreFile(folder / SCORES, STEP, SAMPLES, len(rewards))
    for replica, (share, own) in enumerate(zip(SHARES, updates, strict=True)):
        places = np.array([share, [0] * len(share)])
        write_scores(target, replica, places, whole.rows(torch.tensor(share)), own, loss)
    RolloutFiles(folder, None, done=STEP).write(STEP, "train", rollout)
    (folder / METRICS_FILE).write_text(json.dumps({"step": STEP, "train/loss": mean_of_steps(steps)["loss"]}) + "\n")
    return folder
