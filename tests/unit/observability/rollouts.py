"""A rollout that no engine has sampled."""

import torch

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.rollout.rollout import Rollout


def make_rollout(responses: list[str], rewards: list[float], samples: int = 1) -> Rollout:
    """`samples` responses to each problem, in their order."""
    count = len(responses)
    asked = [
        Problem(({"role": "user", "content": f"question {place}"},), str(place)) for place in range(count // samples)
    ]
    problems = [problem for problem in asked for _ in range(samples)]
    return Rollout(
        tokens_BT=torch.zeros(count, 5, dtype=torch.int64),
        mask_BT=torch.ones(count, 5),
        generation_logprobs_BT=torch.zeros(count, 5),
        lengths_B=torch.full((count,), 5),
        rewards_B=torch.tensor(rewards),
        problems=problems,
        samples_per_prompt=samples,
        prompt_lengths=[2] * count,
        completions=[Completion((1, 2, 3), (0.0, 0.0, 0.0), "stop")] * count,
        responses=responses,
        turns=[[{"role": "assistant", "content": response}] for response in responses],
        endings=["stop"] * count,
        reward_errors=0,
    )
