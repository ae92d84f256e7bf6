"""Measure the time of `nrl-lite why` for a step of 512 samples with 2,046 sampled tokens each: why.py

The files of the step are written first, with random tokens and logprobs. The time is that of the whole command.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import record
import torch

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import make_loss
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.policy.score_files import SCORES, ScoreFile, Update, write_scores
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.store import RolloutFiles
from nemo_rl_lite.run.folder import write_start
from nemo_rl_lite.validation.compose import compose_config

SAMPLES, TOKENS, PER_PROMPT, MICRO_BATCH = 512, 2046, 8, 8
REPETITIONS, MOST_S = 3, 5.0


def main(arguments: list[str]) -> None:
    if arguments:
        sys.exit(__doc__)
    measure(SAMPLES, TOKENS, REPETITIONS)


def measure(samples: int, tokens: int, repetitions: int) -> None:
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    note = f"The machine was busy: a load average of {load:.1f} on {cores} cores." if load > cores / 4 else None
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        write_step(run, samples, tokens)
        seconds = [explained_s(run) for _ in range(repetitions)]
    found = record.result("nrl-lite why", f"{samples} samples, {tokens:,} tokens each", "s", seconds)
    bars = [record.bar("median seconds of nrl-lite why", found["median"], MOST_S, at_least=False)]
    print(record.write("why", [found], bars, note))


def write_step(run: Path, samples: int, tokens: int) -> None:
    """Write configuration, samples, scores and loss of step 1."""
    config = compose_config([f"algorithm.num_prompts_per_step={samples // PER_PROMPT}"])
    options = config.options(GRPOConfig)
    write_start(run, dataclasses.asdict(config), "nrl-lite train")
    rollout = random_rollout(samples, tokens)
    rows, loss = rollout.rows(rollout.advantages or [], 0), make_loss(options)
    batch, random = Batch.padded(rows), torch.Generator().manual_seed(0)
    logprobs_BT = batch.generation_logprobs + 0.01 * torch.randn(batch.mask.shape, generator=random)
    entropy_BT = torch.rand(batch.mask.shape, generator=random)
    batch = replace(batch, previous_logprobs=logprobs_BT, reference_logprobs=logprobs_BT + 0.1)
    counts, value = loss.counts(rows), 0.0
    for begin in range(0, samples, MICRO_BATCH):
        own = slice(begin, begin + MICRO_BATCH)
        value += float(loss(logprobs_BT[own], replace(batch.rows(own), entropy=entropy_BT[own]), counts)[0])
    scores = {"logprobs": logprobs_BT, "entropy": entropy_BT}
    update = Update(slice(0, samples), np.arange(samples) // MICRO_BATCH, scores, False)
    places = np.array([np.arange(samples), np.zeros(samples, int)])
    write_scores(ScoreFile(run / SCORES, 1, PER_PROMPT, samples), 0, places, batch, [update], loss)
    RolloutFiles(run, None, done=1).write(1, "train", rollout)
    (run / METRICS_FILE).write_text(json.dumps({"step": 1, "train/loss": value}) + "\n")


def random_rollout(samples: int, tokens: int) -> Rollout:
    """Return one-turn episodes of random digits, rewards and advantages."""
    random, episodes = np.random.default_rng(0), list[Episode]()
    for place in range(samples):
        episode = Episode(Problem(chat(f"question {place // PER_PROMPT}"), ""), [0, 0], prompt_length=2)
        sampled = random.integers(2, 12, tokens, dtype=np.int32)
        logprobs = -2 * random.random(tokens, dtype=np.float32)
        episode.add_turn(Completion(sampled, logprobs, "stop", ((0, tokens),)), "9" * tokens)
        episode.reward = float(random.integers(2))
        episodes.append(episode)
    advantages = random.standard_normal(samples).tolist()
    return Rollout(episodes, PER_PROMPT, reward_errors=0, advantages=advantages)


def explained_s(run: Path) -> float:
    """Return how long the command takes. Raises SystemExit: it failed."""
    command = [sys.executable, "-m", "nemo_rl_lite", "why", str(run), "--step", "1"]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return seconds


def trial() -> None:
    measure(16, 20, 1)


if __name__ == "__main__":
    record.start(main, trial)
