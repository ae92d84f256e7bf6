"""An agent that changes its history, an engine whose tokens are all different, and a tokenizer of messages."""

import asyncio
import random
from collections.abc import Sequence

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.play import Assistant
from nemo_rl_lite.rollout.segments import Segment

# Sampled tokens are at least `FIRST`, all others less.
FIRST, SAMPLING = 1000, Sampling(1.0, 1.0, None, 8, (), ())


def user(text: str) -> dict:
    return {"role": "user", "content": text}


class Numbers:
    """A message is a token of its role, one for each letter, and 9. The text of a response lists its tokens."""

    def prompt(self, messages, tools=()):
        return [token for message in messages for token in self.message(message)]

    def continuation(self, messages, known, last_token, tools=()):
        return self.prompt(messages[known:])

    def text(self, tokens):
        return " ".join(map(str, tokens.tolist()))

    def message(self, message):
        return [len(message["role"]), *(ord(letter) for letter in message["content"]), 9]


class Engine:
    """Answers each request with some tokens that no other response has, and logprobs that follow from them."""

    def __init__(self, source: random.Random, version: int = 0):
        self.source, self.version, self.next = source, version, FIRST
        self.prompts: dict[int, tuple[int, ...]] = {}
        """The prompt of each request, by the first token of its response."""
        self.seeds: list[int] = []
        self.engines: dict[int, object] = {}

    async def sample(self, request, conversation, progress=None):
        for _ in range(self.source.randrange(4)):
            await asyncio.sleep(0)
        tokens = range(self.next, self.next + self.source.randint(1, 4))
        self.next = tokens.stop
        self.prompts[tokens.start] = request.prompt
        self.seeds.append(request.seed)
        completion = Completion(tokens, [logprob_of(one) for one in tokens], "stop", (self.version,) * len(tokens))
        conversation.add_turn(request, completion, 0)
        return completion, 0


def logprob_of(token: int) -> float:
    return -token / 4096


def begun(engine: Engine, text: str = "go") -> tuple[Episode, Assistant]:
    """An episode before its agent's first request, and its assistant."""
    problem = Problem(chat(text), "")
    tokens = Numbers().prompt(problem.messages)
    episode = Episode(problem, tokens, len(tokens))
    return episode, Assistant(episode, engine, Numbers(), SAMPLING, (1, 2, 3), 4096)  # pyrefly: ignore


async def ask(assistant: Assistant, messages: Sequence[dict], tools: Sequence[dict] = ()) -> tuple[Segment, list[dict]]:
    """Send a request, as an endpoint does. Return the segment, and the messages with the response."""
    episode, tokenizer = assistant.episode, assistant.tokenizer
    start = episode.start_of(messages, tools)
    # As an endpoint tokenizes in a thread.
    await asyncio.sleep(0)
    if start.segment is None:
        tokens = tokenizer.prompt(messages)
    else:
        tokens = tokenizer.continuation(messages, start.messages, start.tokens[-1])
    segment = await assistant.answer(messages, tools, start, tokens)
    segment.note([*messages, segment.said[-1]])
    return segment, segment.history.messages


async def wander(assistant: Assistant, source: random.Random, steps: int) -> None:
    """Ask as an agent may: go on, compact, go back, change a message, or ask several things at once."""
    histories: list[list[dict]] = [[*assistant.episode.problem.messages]]
    for step in range(steps):
        old = source.choice(histories)
        cut = old[: source.randrange(len(old)) + 1]
        changed = [{**one, "content": one["content"][1:]} if source.random() < 0.2 else one for one in old]
        kinds = {
            "on": [*old, user(f"on{step}")],
            "compact": [old[0], user(f"so far{step}")],
            "back": [*cut, user(f"back{step}")],
            "changed": [*changed, user(f"c{step}")],
            "agent": [user(f"sub{step}")],
        }
        asked = [kinds[source.choice([*kinds, "on", "on"])] for _ in range(source.choice([1, 1, 2, 3]))]
        if source.random() < 0.2:
            asked.append(asked[0])
        histories += [history for _, history in await asyncio.gather(*(ask(assistant, one) for one in asked))]


def wandered(seed: int, steps: int = 8, version: int = 0) -> tuple[Episode, Engine]:
    """A whole episode of such an agent."""
    source = random.Random(seed)
    engine = Engine(source, version)
    episode, assistant = begun(engine)
    asyncio.run(wander(assistant, source, steps))
    episode.reward = source.random()
    episode.end()
    return episode, engine
