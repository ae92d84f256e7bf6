"""How far a rollout is."""

import asyncio
import time

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.rollout.collector import Group, progress
from nemo_rl_lite.rollout.episode import Episode, Span
from tests.unit.rollout.script import completion


def group(*spans: Span, said: str = "") -> Group:
    """A prompt with one episode, which is done where it has said something and waits for nothing."""
    episode = Episode(Problem(chat("?"), "!"), [1], 1, spans=list(spans))
    if said:
        episode.add_turn(completion(said), said)
    played = asyncio.get_running_loop().create_future()
    if said and episode.waits_for is None:
        played.set_result(None)
    return Group([episode], played)


def test_it_says_what_is_done_how_fast_and_what_others_wait_for():
    async def shown() -> list[str]:
        long_ago = time.perf_counter() - 7
        groups = [
            group(Span("generate", 0.0, 1.0), said="nine more"),
            group(Span("generate", long_ago)),
            group(Span("generate", long_ago + 6)),
            group(Span("generate", 0.0, 1.0), Span("environment", 1.0), said="four"),
            group(Span("generate", 0.0, 1.0), Span("reward", 1.0), said="four"),
        ]
        return [progress(groups, 8, 4.0), progress(groups[:1], 1, 4.0), progress([], 8, 4.0)]

    whole, done, nothing = asyncio.run(shown())
    assert whole == (
        "1 of 8 prompts, 5 tokens/s, 2 responses under way, the longest for 7 s, 1 wait for the environment, "
        "1 wait for the reward"
    )
    assert done == "1 of 1 prompts, 2 tokens/s" and nothing == "0 of 8 prompts"
