"""Simulate rollouts whose KV cache overflows, with the launcher's queue and with a queue that ignores the cache.

The queue's own classes assign the requests. The engine is a model of vLLM's scheduler. It preempts its newest request
when the cache is full. It keeps the prefixes of ended turns until it needs their room, and computes lost tokens again.

The costs are those of a model with 8e9 parameters and 147,456 bytes of KV cache per token on one H100. Decoding reads
3.35e12 B/s, and a prefill reaches half of 989e12 FLOP/s.
"""

import argparse
import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import record

from nemo_rl_lite.generation.admission import Admission
from nemo_rl_lite.generation.assignment import Assignment, PendingRequest
from nemo_rl_lite.generation.interface import Completion, Conversation, EngineLoad, Request, Sampling
from nemo_rl_lite.generation.vllm.arguments import WATERMARK

# Costs in s of a forward pass, for each cached token that it reads, and for each sequence.
PASS_S, CACHED_S, SEQUENCE_S = 8e-3, 4.4e-8, 1e-5
# Costs in s of a prefill, for each token, and for each pair of tokens.
PREFILL_S, PAIR_S = 3.2e-5, 1.2e-9
CACHE, MOST, SLICE_S = 370_000, 256, 0.05
SAMPLING = Sampling(1.0, 1.0, None, 32_768, (), ())


@dataclass(frozen=True)
class Task:
    """Episodes of one step: `prompts` x `samples`."""

    name: str
    prompts: int
    samples: int
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Mean tokens of a turn's response."""
    longest: int
    """Maximum tokens of a turn's response."""
    turns: int = 1
    """Mean number of turns."""
    answer: int = 0
    """Tokens that the environment adds after a turn."""
    waits_s: float = 0.0
    """Time in s of the environment per turn."""

    def episodes(self, step: int) -> "list[Episode]":
        """Draw the episodes of a step. Prompts differ in length more than their samples do."""
        found = []
        for prompt in range(self.prompts):
            hardness = random.Random(f"prompt {prompt}").gauss(0, 0.7)
            for sample in range(self.samples):
                dice = random.Random(f"{step} {prompt} {sample}")
                count = dice.randint(math.ceil(self.turns / 2), self.turns * 3 // 2)
                lengths = [self._length(dice, hardness) for _ in range(count)]
                found.append(Episode((prompt,) * self.prompt, lengths, self))
        return found

    def _length(self, dice: random.Random, hardness: float) -> int:
        # The mean of a lognormal variable is exp(variance / 2).
        spread = math.exp(hardness - 0.245 + dice.gauss(0, 0.5) - 0.125)
        return min(self.longest, max(8, int(self.response * spread)))


@dataclass(eq=False)
class Episode:
    """An episode with the lengths of its turns that are left."""

    tokens: tuple[int, ...]
    lengths: list[int]
    task: Task
    conversation: Conversation = field(default_factory=Conversation)

    def __post_init__(self) -> None:
        self.conversation.ended = self.task.turns == 1


@dataclass(eq=False)
class Job:
    """A request in the engine."""

    number: int
    episode: Episode
    held: int
    """Tokens of prompt and response so far."""
    left: int
    computed: int = 0
    """Tokens that were in the cache before."""


class Engine:
    """vLLM's scheduler over a cache of tokens instead of blocks."""

    def __init__(self, watermark: float, cache: int):
        self.cache, self._headroom = cache, int(watermark * cache)
        self.now, self.used, self.preempted, self.again, self.decoded, self.usage = 0.0, 0, 0, 0, 0, 0.0
        self._running: list[Job] = []
        self._waiting: deque[Job] = deque()
        # Tokens of freed sequences, the oldest first.
        self._freed: OrderedDict[Episode, int] = OrderedDict()
        self._told = 0

    def submit(self, number: int, episode: Episode) -> None:
        self._waiting.append(Job(number, episode, len(episode.tokens), episode.lengths[0], episode.conversation.tokens))

    def load(self) -> EngineLoad:
        preempted, self._told = self.preempted - self._told, self.preempted
        usage = self.used / self.cache
        return EngineLoad(0, len(self._running), len(self._waiting), self.used, usage, preempted)

    def work(self, until: float) -> list[Job]:
        """Work until this second, and return the finished jobs."""
        done: list[Job] = []
        while self.now < until and (self._running or self._waiting):
            if not self._preempt():
                self._admit()
            count = len(self._running)
            seconds = PASS_S + CACHED_S * self.used + SEQUENCE_S * count
            passes = min((self.cache - self.used) // count, min(job.left for job in self._running))
            passes = max(1, min(passes, math.ceil((until - self.now) / seconds)))
            for job in self._running:
                job.held += passes
                job.left -= passes
            self.now += passes * seconds
            self.usage += passes * seconds * self.used / self.cache
            self.used += passes * count
            self.decoded += passes * count
            ended = [job for job in self._running if job.left <= 0]
            for job in ended:
                self._free(job)
            done += ended
            self._running = [job for job in self._running if job.left > 0]
        self.now = max(self.now, until)
        return done

    def _preempt(self) -> bool:
        before = self.preempted
        while self.used + len(self._running) > self.cache and len(self._running) > 1:
            job = self._running.pop()
            self._free(job)
            job.computed = job.held
            self._waiting.appendleft(job)
            self.preempted += 1
        self._evict()
        return self.preempted > before

    def _admit(self) -> None:
        while self._waiting and len(self._running) < MOST:
            job = self._waiting[0]
            headroom = self._headroom if self._running else 0
            if self._running and self.used + job.held + 1 + headroom > self.cache:
                return
            self._waiting.popleft()
            self._running.append(job)
            self.used += job.held
            found = min(self._freed.pop(job.episode, 0), job.held - 1)
            self._evict()
            self.again += max(0, job.computed - found)
            self.now += (job.held - found) * (PREFILL_S + PAIR_S * (job.held + found) / 2)

    def _free(self, job: Job) -> None:
        self.used -= job.held
        self._freed[job.episode] = job.held

    def _evict(self) -> None:
        too_much = self.used + len(self._running) + sum(self._freed.values()) - self.cache
        while too_much > 0 and self._freed:
            episode, tokens = next(iter(self._freed.items()))
            if tokens > too_much:
                self._freed[episode] = tokens - too_much
                return
            del self._freed[episode]
            too_much -= tokens


class Unaware(Admission):
    """Admits all requests."""

    def capacity(self, load: EngineLoad, between_turns: Sequence[int] = ()) -> int:
        return self.most


class InOrder(Assignment):
    """Gives requests in the order in which they come."""

    def _place(self, asked: PendingRequest) -> tuple[int, bool, float, int]:
        return asked.request.step, False, 0.0, asked.number


@dataclass(frozen=True)
class Way:
    """Treatment of full caches by queue and engines."""

    orders: bool = False
    admits: bool = False
    watermark: float = 0.0


class Rollouts:
    """Rollouts of a task in virtual time."""

    def __init__(self, task: Task, way: Way, engines: int, cache: int = CACHE):
        self.task, self._number = task, 0
        self.engines = [Engine(way.watermark, cache) for _ in range(engines)]
        self._queue = (Assignment if way.orders else InOrder)(engines, MOST, lambda: self.engines[0].now)
        if not way.admits:
            for held in self._queue.held:
                held.admission = Unaware(MOST)
        self._asked: dict[int, Episode] = {}
        # Episodes in their environment, by the second in which it answers.
        self._later: list[tuple[float, int, Episode]] = []

    def step(self, step: int) -> float:
        """Sample the rollout of a step; return its time in s."""
        began = now = self.engines[0].now
        for episode in self.task.episodes(step):
            self._ask(episode, step)
        while self._asked or self._later:
            while self._later and self._later[0][0] <= now:
                self._ask(heapq.heappop(self._later)[2], step)
            self._queue.assign()
            now += SLICE_S
            for replica, engine in enumerate(self.engines):
                for number in self._queue.held[replica].hand_over()[0]:
                    engine.submit(number, self._asked[number])
                for job in engine.work(now):
                    self._finish(replica, job)
                self._queue.observe(replica, engine.load())
            now = max(engine.now for engine in self.engines)
        return now - began

    def _ask(self, episode: Episode, step: int) -> None:
        request = episode.conversation.begin_turn(Request(episode.tokens, SAMPLING, 0, step))
        self._asked[self._number] = episode
        self._queue.add(PendingRequest(self._number, request, None, episode.conversation))  # pyrefly: ignore
        self._number += 1

    def _finish(self, replica: int, job: Job) -> None:
        episode, length = self._asked.pop(job.number), job.episode.lengths.pop(0)
        tokens = (0,) * length
        self._queue.finish(replica, job.number, Completion(tokens, (), "stop", (0,)))
        if episode.lengths:
            episode.tokens += tokens + (0,) * self.task.answer
            heapq.heappush(self._later, (self.engines[replica].now + self.task.waits_s, self._number, episode))
            self._number += 1
        else:
            episode.conversation.ended = True


WAYS = {
    "vLLM alone": Way(),
    "watermark": Way(watermark=WATERMARK),
    "watermark, longest first": Way(orders=True, watermark=WATERMARK),
    "default": Way(orders=True, admits=True, watermark=WATERMARK),
}
TASKS = [
    Task("32k responses", 64, 8, 300, 9_000, 32_768),
    Task("short responses", 256, 8, 300, 400, 2_048),
    Task("40 turns, fast tools", 16, 8, 2_000, 300, 2_048, turns=40, answer=400, waits_s=0.1),
    Task("40 turns, tools of 10 s", 16, 8, 2_000, 300, 2_048, turns=40, answer=400, waits_s=10.0),
    Task("40 turns, tools of 60 s", 16, 8, 2_000, 300, 2_048, turns=40, answer=400, waits_s=60.0),
]


def measure(task: Task, engines: int, steps: int, cache: int) -> Iterator[dict[str, Any]]:
    """Yield the results of a task with each queue, from the steps after the first."""
    for name, way in WAYS.items():
        rollouts = Rollouts(task, way, engines, cache)
        setting = f"{task.name}, {engines} engine{'s' * (engines > 1)}: {name}"
        seconds, rates, again, preempted = [], [], [], []
        for step in range(steps):
            before = _sums(rollouts)
            seconds.append(rollouts.step(step))
            decoded, lost, stopped, _ = (now - then for now, then in zip(_sums(rollouts), before, strict=True))
            rates.append(decoded / seconds[-1])
            again.append(lost / decoded)
            preempted.append(stopped)
        print(setting, [round(rate) for rate in rates], [round(one, 2) for one in again], preempted, flush=True)
        yield record.result("throughput", setting, "tokens/s", rates[1:])
        yield record.result("rollout", setting, "s", seconds[1:])
        yield record.result("preemptions", setting, "", preempted[1:])
        yield record.result("tokens computed again, per sampled token", setting, "", again[1:])


def _sums(rollouts: Rollouts) -> tuple[float, ...]:
    parts = [(engine.decoded, engine.again, engine.preempted, engine.usage) for engine in rollouts.engines]
    return tuple(map(sum, zip(*parts, strict=True)))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cache", type=int, default=CACHE)
    given = parser.parse_args(arguments)
    runs = [(task, count) for task in TASKS for count in given.engines]
    results = [one for task, count in runs for one in measure(task, count, given.steps, given.cache)]
    record.write("admission", results, [], machine=False)


def trial() -> None:
    tiny = Task("tiny", 4, 4, 30, 300, 2_000)
    record.write("admission", list(measure(tiny, 1, 2, 2_000)), [], machine=False)


if __name__ == "__main__":
    record.start(main, trial)
