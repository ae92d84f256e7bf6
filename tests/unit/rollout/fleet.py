"""Engines in this process that say which weights sampled each token, behind the real queue of requests."""

from contextlib import asynccontextmanager
from dataclasses import replace

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Completion, Sampling, Unfinished
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.rollout.collector import ErrorShares
from nemo_rl_lite.rollout.sampler import PromptCooldown, PromptOrder, Sampler
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.generation.stepped import Stepped
from tests.unit.rollout.script import collected_by, judged_by

LOST = WorkerError("generation rank 0", "generate", "the process died", lost=True)
LONGEST = 40


class Replica(Stepped):
    """Samples a token of each of its requests in a report; a response has a length of its own."""

    seconds = 0.0003

    def __init__(self):
        super().__init__()
        self.weights, self.held, self.is_dead, self.error = -1, {}, False, None
        self.sampled = 0

    def work(self, submitted, aborted):
        if self.is_dead:
            raise LOST
        if self.error:
            raise self.error
        assert self.weights >= 0, "the engine has no weights yet"
        self.held |= {number: (request, begun(request)) for number, request in submitted.items()}
        for number in aborted:
            self.held.pop(number, None)
        for _, versions in self.held.values():
            versions.append(self.weights)
        self.sampled += len(self.held)
        done = {n: own for n, own in self.held.items() if len(own[1]) == length(own[0])}
        self.held = {n: own for n, own in self.held.items() if n not in done}
        telling = {number: own for number, own in self.held.items() if own[0].continues}
        return {n: newest(*own) for n, own in telling.items()} | {n: answer(*own) for n, own in done.items()}


def length(request) -> int:
    return 2 + request.seed % (LONGEST - 2)


def begun(request) -> list[int]:
    """The version of each token that a request has."""
    return [] if request.begun is None else [version for version, count in request.begun.versions for _ in range(count)]


def newest(request, versions) -> Unfinished:
    """The last of these tokens, which are not all."""
    token = ord("0") + request.seed % 2 if len(versions) == 1 else ord("-")
    return Unfinished((token,), (-0.25 * (request.seed % 7),), "length", versions[-1:])


def answer(request, versions) -> Completion:
    # Samples of a prompt differ, and a sample is the same whoever samples it.
    tokens = (ord("0") + request.seed % 2, *[ord("-")] * (len(versions) - 2), 0)
    return Completion(tokens, tuple(-0.25 * (request.seed % 7) for _ in tokens), "stop", tuple(versions))


class Fleet:
    """`Generation` of the rollouts, and the engines that a source steers."""

    def __init__(self, replicas: int = 1, capacity: int = 64):
        self.replicas, self.refitted = [Replica() for _ in range(replicas)], []
        self.queue = RequestQueue(self.replicas, capacity, lambda *_: None, lambda: None)

    @asynccontextmanager
    async def serving(self):
        async with self.queue.serving() as queue:
            yield queue

    def refit(self, version: int) -> dict[str, float]:
        assert not any(replica.under_way for replica in self.replicas), "new weights while an engine works"
        for number, replica in enumerate(self.replicas):
            if replica.is_dead:
                # A new engine has nothing of the lost one.
                replica.is_dead, replica.held, replica.pending, replica.unreported = False, {}, ({}, []), {}
                self.queue.replaced([number])
            replica.weights = version
        self.refitted.append(version)
        return {"bytes": 8.0}

    def admit(self) -> None: ...

    def finish_generation(self) -> dict[str, float]:
        return {"engine/kv_cache": 4.0}


class Repeating:
    """Training data whose prompts are their positions; those of an epoch are those of the first, where it has an
    end."""

    def __init__(self, epoch: int):
        self._epoch = epoch

    def problem(self, position):
        return Problem(chat(f"p {position % self._epoch if self._epoch else position}"), "1")


def sampler(fleet, state=None, prompts=3, samples=2, epoch=0, play=None, continues=False, **options) -> Sampler:
    """With an `epoch` of some prompts, those that teach nothing rest for up to four epochs."""
    config = compose_config([f"algorithm.num_generations_per_prompt={samples}"]).options(GRPOConfig)
    config = replace(config, num_prompts_per_step=prompts, **options)
    judge, shares = judged_by(lambda response, _: float(response[0] == "1")), ErrorShares(0.0, 0.0)
    collector = collected_by(fleet, judge, 64 if play is None else 512, shares, play, continues=continues)
    held_out = [Problem(chat(f"held out {number}"), "1") for number in range(2)]
    state = {"position": 0, **(state or {})}
    resting = PromptCooldown(4, epoch, state.get("resting"), state["position"])
    order = PromptOrder(Repeating(epoch), resting, state)  # pyrefly: ignore
    return Sampler(config, collector, Sampling(1.0, 1.0, None, LONGEST, (0,), ()), held_out, order)


def asked(rollout) -> list[str]:
    """The prompts of a rollout."""
    found = [episode.problem.messages[0]["content"] for episode in rollout.episodes]
    return [text for place, text in enumerate(found) if not place or found[place - 1] != text]


def versions(rollout) -> set[int]:
    """The weights that sampled a rollout."""
    return {version for episode in rollout.episodes for _, turn in episode.turns for version, _ in turn.versions}
