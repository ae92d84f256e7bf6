"""A rollout that no engine has sampled."""

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.rollout.episode import Episode, Span
from nemo_rl_lite.rollout.rollout import Rollout


def make_rollout(responses: list[str], rewards: list[float], samples: int = 1) -> Rollout:
    """`samples` responses to each problem, in their order: prompts of 2 tokens, responses of 3."""
    episodes = []
    for place, (response, reward) in enumerate(zip(responses, rewards, strict=True)):
        number = place // samples
        problem = Problem(({"role": "user", "content": f"question {number}"},), str(number))
        episode = Episode(problem, [0, 0], prompt_length=2)
        episode.add_turn(Completion((1, 2, 3), (0.0, 0.0, 0.0), "stop", (0, 0, 0)), response)
        episode.reward = reward
        episode.spans = [
            Span("generate", 100.0, 101.0 + place, place % 2),
            Span("reward", 101.0 + place, 101.5 + place),
        ]
        episodes.append(episode)
    return Rollout(episodes, samples, reward_errors=0)
