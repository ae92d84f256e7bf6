"""The scripts about NeMo-RL's published step: forced lengths, and variants that compose."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import published_row
import pytest
from random_model import model_config

from nemo_rl_lite.config.sizes import (
    ParallelDims,
    engines,
    keeps_partial_rollouts,
    optimizer_steps,
    parallel_dims,
    samples_per_step,
)
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.models.shape import find_shape, model_shape
from nemo_rl_lite.rollout.play import SingleTurn
from nemo_rl_lite.validation.compose import compose_config

MODEL = "policy.model_name=a/model"


def test_each_step_deals_the_same_lengths_to_other_responses(monkeypatch):
    monkeypatch.setattr(SingleTurn, "play", SingleTurn.play)
    published_row.force(30, 1.0, samples=4, count=32)
    sampling = Sampling(1.0, 1.0, None, 128, stop_token_ids=(2,), stop_strings=())

    def asked(seed: int) -> list[int]:
        given: list[Sampling] = []

        async def respond(sampling: Sampling) -> None:
            given.append(sampling)

        for place in range(32):
            one = SimpleNamespace(seeds=(seed, place // 4, place % 4), sampling=sampling, respond=respond)
            asyncio.run(SingleTurn().play(None, one))
        assert not any(one.stop_token_ids for one in given)
        return [one.max_new_tokens for one in given]

    first, again, second = asked(1), asked(1), asked(2)
    assert first == again != second
    assert Counter(first) == Counter(second) == Counter(published_row.quantiles(32, 30, 1.0, 128))


@pytest.mark.parametrize(
    ("gpus", "rollouts", "batch"),
    [(8, "one step off", 512), (2, "sync", 2048), (1, "sync", 512), (4, "partial", 512)],
)
def test_every_variant_composes_with_its_share_of_the_batch(gpus, rollouts, batch):
    config = compose_config([*published_row.settings(gpus, batch, rollouts), MODEL])
    assert keeps_partial_rollouts(config) == (rollouts == "partial")
    assert samples_per_step(config) == 256 * gpus
    assert optimizer_steps(config) == 2048 // batch
    policy = gpus // 2 if rollouts == "one step off" else gpus
    assert engines(config) == (gpus - policy or gpus)
    stages = min(2, policy)
    assert parallel_dims(config) == ParallelDims(tp=1, pp=stages, cp=1, ep=1, world=policy)


def test_the_random_model_has_the_published_shape():
    made = model_config("llama3.1-8b").to_dict()
    assert model_shape(made) == find_shape(published_row.PUBLISHED)
