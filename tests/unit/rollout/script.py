"""An engine that answers from a list, and a tokenizer of letters."""

from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace

import numpy as np

from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.losses.batch import OF_TOKENS
from nemo_rl_lite.rewards.judge import Judge, RewardCalls, Term, sum_of
from nemo_rl_lite.rewards.registry import Reward
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutCollector
from nemo_rl_lite.rollout.groups import GroupPlayer, LocalPlayers
from nemo_rl_lite.rollout.play import EpisodeRunner, SingleTurn

END = 0


def plain(rows) -> list[dict]:
    """Rows as dictionaries of lists, which compare by value."""
    return [{name: np.asarray(getattr(row, name)).tolist() for name in (*OF_TOKENS, "advantage")} for row in rows]


class Letters:
    """One token a letter; 0 ends a turn; `|` begins the assistant's."""

    end_tokens, highest_token, longest_token = (END,), 127, 1

    def prompt(self, messages, tools=()):
        return [ord(letter) for letter in f"{messages[-1]['content']}|"]

    def opening(self, text):
        return [ord(letter) for letter in text]

    def between_turns(self, messages, last_token):
        assert last_token == END
        return [ord(letter) for message in messages for letter in f"{message['content']}|"]

    def continuation(self, messages, known, last_token, tools=()):
        assert last_token == END
        ends = {"assistant": chr(END)}
        texts = (f"{message['content']}{ends.get(message['role'], '|')}" for message in messages[known:])
        return [ord(letter) for text in texts for letter in text]

    def text(self, tokens):
        return "".join(chr(token) for token in tokens if token)

    def piece(self, token):
        return chr(token)


def collected_by(
    generation,
    judge: Judge,
    max_length: int,
    shares: ErrorShares,
    play: EpisodeRunner | None = None,
    tokenizer=None,
    continues: bool = False,
) -> RolloutCollector:
    """A collector whose episodes are played here."""
    runner = play or SingleTurn()
    player = GroupPlayer(tokenizer or Letters(), judge, runner, max_length, continues)  # pyrefly: ignore
    return RolloutCollector(LocalPlayers(generation, {"": player}), {"": replace(shares, section=runner.section)})


class Queue:
    """A queue of requests that never waits."""

    are_in_work, unfinished_tokens = False, 0

    @asynccontextmanager
    async def serving(self):
        yield self

    def submit_as_batch(self):
        return nullcontext()


class Script(Queue):
    """Answers each turn from a list of its own, in the order of the requests; keeps what it was asked. A text that ends
    in three dots was cut."""

    def __init__(self, *turns: list[str]):
        self.turns, self.asked, self.is_held_back = [list(turn) for turn in turns], [[] for _ in turns], False
        self.conversations, self.ended_before = {}, []

    @contextmanager
    def submit_as_batch(self):
        self.is_held_back = True
        yield
        self.is_held_back = False

    async def sample(self, request, conversation, progress=None):
        turn = request.prompt.count(END)
        assert (conversation.tokens == 0) == (turn == 0) and (turn > 0 or self.is_held_back), (
            "first turns begin together"
        )
        self.asked[turn].append(request)
        self.conversations[id(conversation)] = conversation
        self.ended_before.append(conversation.ended)
        found = completion(self.turns[turn].pop(0))
        conversation.add_turn(request, found, 0)
        return found, 0


def completion(text: str) -> Completion:
    tokens = [ord(letter) for letter in text.removesuffix("...")] + ([] if text.endswith("...") else [END])
    logprobs = [-(index + 1) / 8 for index in range(len(tokens))]
    reason = "length" if text.endswith("...") else "stop"
    return Completion(tuple(tokens), tuple(logprobs), reason, (0,) * len(tokens))


def judged_by(reward: Reward) -> Judge:
    """Judge in this process with one function."""
    term, calls = Term("own", "own", {}, 1.0, "reward"), RewardCalls([])
    calls._terms, calls._single = {"own": term}, {"own": reward}
    return sum_of([term], calls, at_once=1)
