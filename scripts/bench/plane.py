"""Measure the data plane with scripted engines: plane.py engines, plane.py launcher or plane.py replay.

engines: share of time in which engines step, with one request queue for all, and with a queue for every 8
launcher: CPU time and bytes of the launcher in a rollout, per token and per episode
replay: bytes of routed experts in the launcher, per token, for 48 layers with 8 experts per token

The steps of engines sleep. Queues, actors and messages are the real ones.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import record
from scripted import BANK, IN_FLIGHT, LONGEST, VOCABULARY, BankGroup, Script, Seat, Work, raise_loss

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.runtime import ray_runtime
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.problems import FileSet, Problem, chat
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.losses.advantages import group_advantages
from nemo_rl_lite.rewards.judge import make_judge
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutCollector
from nemo_rl_lite.rollout.groups import GroupPlayer, LocalPlayers, Playground
from nemo_rl_lite.rollout.play import SingleTurn
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.sampler import PromptCooldown, PromptOrder, Sampler
from nemo_rl_lite.rollout.store import RolloutFiles
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.policy import RemotePolicy
from nemo_rl_lite.workers.rollouts import RolloutWorkers

# Maximum number of processes of the queues.
PROCESSES = 8
# Seconds in which engines get their first requests, at most, and between two looks at them.
_FULL_S, _LOOK_S = 100.0, 3.0
# Layers, and experts per token, of Qwen3-30B-A3B.
EXPERTS = (48, 8)
SAMPLES = 8


class Actors:
    """Groups of actors, which end with the block."""

    def __init__(self) -> None:
        self._folder, self._groups = tempfile.TemporaryDirectory(prefix="plane-"), list[WorkerGroup]()

    def __enter__(self) -> "Actors":
        return self

    def __exit__(self, *_: Any) -> None:
        for group in self._groups:
            for host in group.hosts:
                ray.kill(host)
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def start(self, kind: type[WorkerGroup], path: str, arguments: Sequence[dict[str, Any]]) -> WorkerGroup:
        """Start a worker of the class at `path` with each of the arguments."""
        group = kind(path.split(".")[1].lower(), [{}] * len(arguments), self._folder.name, {})
        self._groups.append(group)
        wait(group.load(path, [{}] * len(arguments)))
        wait(group.start(arguments))
        return group

    def start_engines(self, count: int, script: Script, path: str = "scripted.EngineBank") -> "Engines":
        counts = [min(BANK, count - start) for start in range(0, count, BANK)]
        return Engines(self.start(BankGroup, path, [{"count": own, "script": script} for own in counts]), counts)


class ListenedGroup(WorkerGroup):
    """Workers that take calls of `call_beside`."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments, is_listened=True)


class Engines:
    """Scripted engines in banks."""

    def __init__(self, banks: WorkerGroup, counts: Sequence[int]):
        self.banks = banks
        self.seats = [Seat(banks, place, engine) for place, own in enumerate(counts) for engine in range(own)]

    def __len__(self) -> int:
        return len(self.seats)

    def part(self, ranks: Sequence[int]) -> Seat:
        """Return one engine, as `WorkerGroup.part` does."""
        [rank] = ranks
        return self.seats[rank]

    def work(self) -> list[Work]:
        """Return the work of each engine since the last call."""
        asked = [self.banks.call_beside(place, "work", phase="work") for place in range(len(self.banks))]
        return [work for bank in wait(*asked) for work in bank]


@contextmanager
def runtime() -> Iterator[None]:
    """Run Ray, whose processes can import this folder's modules."""
    own = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([own, str(record.ROOT), os.environ.get("PYTHONPATH", "")])
    # As the launcher does.
    gc.freeze()
    with ray_runtime():
        yield


def measure_engines(count: int, each: int, script: Script, seconds: float, reps: int) -> list[dict[str, Any]]:
    """Measure `count` engines, with a queue for every `each`."""
    with Actors() as actors:
        engines = actors.start_engines(count, script)
        queues = [engines.seats[start : start + each] for start in range(0, count, each)]
        processes = min(len(queues), PROCESSES)
        arguments = [{"queues": queues[process::processes]} for process in range(processes)]
        clients = actors.start(WorkerGroup, "scripted.FullQueues", arguments)
        _wait_until_full(engines)
        found = [_window(engines, clients, script, seconds) for _ in range(reps)]
    which = "one queue" if len(queues) == 1 else f"queues of {each}"
    setting = f"{count} engines, {which}"
    units = {"throughput": "tokens/s", "CPU of the queues": "cores"}
    results = [record.result(name, setting, units.get(name, ""), [one[name] for one in found]) for name in found[0]]
    print(setting, {one["name"]: one["reps"] for one in results}, flush=True)
    return results


def _wait_until_full(engines: Engines) -> None:
    """Wait until the number of requests in flight no longer grows, at most `_FULL_S` seconds."""
    before, share, deadline = 0.0, 0.0, time.monotonic() + _FULL_S
    while (not share or share > before + 0.01) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        before, share = share, statistics.mean(one.in_flight for one in engines.work())


def _window(engines: Engines, clients: WorkerGroup, script: Script, seconds: float) -> dict[str, float]:
    engines.work()
    before, began = sum(wait(clients.call("cpu_s"))), time.monotonic()
    time.sleep(seconds)
    work, wall = engines.work(), time.monotonic() - began
    cpu_s = sum(wait(clients.call("cpu_s"))) - before
    steps = sum(one.steps for one in work)
    return {
        "busy": statistics.mean(one.stepping_s / one.wall_s for one in work),
        "requests in flight": statistics.mean(one.in_flight for one in work),
        "throughput": sum(one.steps * one.in_flight for one in work) * IN_FLIGHT * script.burst / wall,
        "CPU of the queues": cpu_s / wall,
        "step over its script": sum(one.stepping_s for one in work) / max(steps, 1) / script.step_s,
    }


class InLauncher:
    """The launcher collects rollouts: engines send it all tokens, and it sends them to the policy."""

    def __init__(self, actors: Actors, prompts: int, engines: int = 4):
        self._banks = actors.start_engines(engines, Script(0.01, 1), "scripted.CountingBank")
        self._ranks = actors.start(WorkerGroup, "scripted.CountingPolicy", [{}])
        self._policy = RemotePolicy(self._ranks, prompts * SAMPLES)
        self._files = RolloutFiles(actors.folder, None, 0)
        config = compose_config(["reward=exact_match", f"generation.vllm_cfg.max_num_seqs={IN_FLIGHT}"])
        # The embedded model has fewer positions.
        self._task = replace(config, policy=replace(config.policy, max_total_sequence_length=2 * LONGEST))
        sizes = {"num_prompts_per_step": prompts, "num_generations_per_prompt": SAMPLES}
        self._config = replace(self._task.options(GRPOConfig), **sizes)
        collector = RolloutCollector(self._playground(actors), {"": ErrorShares(0.0, 0.0)})
        problems = tuple(Problem(chat("word7 " * 300), str(number)) for number in range(prompts))
        order = PromptOrder(FileSet(problems, 0, shuffle=True), PromptCooldown(0, 0), {"position": 0})
        self._sampler = Sampler(self._config, collector, Sampling(1.0, 1.0, None, LONGEST, (0,), ()), [], order)

    def _playground(self, actors: Actors) -> Playground:
        queue = RequestQueue([seat.replica() for seat in self._banks.seats], IN_FLIGHT, raise_loss, raise_loss)
        tokenizer = ChatTokenizer(large_tokenizer(actors.folder / "tokenizer"))
        player = GroupPlayer(tokenizer, make_judge(self._task.reward), SingleTurn(), 2 * LONGEST)
        return LocalPlayers(queue, {"": player})  # pyrefly: ignore

    @property
    def episodes(self) -> int:
        """Return the episodes of a step."""
        return self._config.num_prompts_per_step * SAMPLES

    def follow(self, script: Script) -> None:
        """Change what engines do."""
        wait(self._banks.banks.call("follow", script))

    def step(self, step: int) -> Rollout:
        """Do what the launcher does with a step's rollout."""
        rollout, config = self._sampler.rollout(step), self._config
        rewards_PG = rollout.rewards_B.view(-1, SAMPLES)
        advantages_PG = group_advantages(rewards_PG, config.use_leave_one_out_baseline, False)
        rollout.advantages = advantages_PG.flatten().tolist()
        self._files.begin(step, "train", rollout)
        batch = self._policy.put_batch(rollout.rows(rollout.advantages, step - 1))
        self._policy.work(batch, ())
        rollout.metrics(), rollout.ages(step - 1), rollout.seconds()
        self._files.write(step, "train", rollout)
        rollout.release()
        return rollout

    def take_bytes(self) -> int:
        """Return the bytes of the last step's messages."""
        return sum(wait(self._banks.banks.call("take_bytes"), self._ranks.call("take_bytes")))


class InWorkers(InLauncher):
    """Two rollout workers play the episodes: the launcher has records of episodes, and references to rows."""

    def _playground(self, actors: Actors) -> Playground:
        own = {"config": self._task, "model_path": str(large_tokenizer(actors.folder / "tokenizer"))}
        own |= {"folder": str(actors.folder), "current_folder": str(actors.folder)}
        each = [own | {"rank": rank, "name": f"rollouts rank {rank}"} for rank in range(2)]
        self._workers = actors.start(ListenedGroup, "scripted.CountingWorker", each)
        return RolloutWorkers(
            *(self._workers, self._banks, self._task, Path(), actors.folder),  # pyrefly: ignore
            *(raise_loss, raise_loss, raise_loss, print),
        )

    def take_bytes(self) -> int:
        """Return the bytes of the last step's messages with the launcher."""
        return sum(wait(self._workers.call("take_bytes"), self._ranks.call("take_bytes")))


# The ways in which tokens reach the policy.
WAYS = {"launcher collects": InLauncher, "rollout workers collect": InWorkers}


def large_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with a token for each of many words; return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<unk>": 1} | {f"word{token}": token for token in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokens = {"eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **tokens).save_pretrained(folder)
    return folder


Measure = Callable[[str, InLauncher], list[dict[str, Any]]]


def measure_ways(prompts: int, *measures: Measure) -> list[list[dict[str, Any]]]:
    """Start the processes of each way once; return the results of each measurement."""
    results: list[list[dict[str, Any]]] = [[] for _ in measures]
    for name, way in WAYS.items():
        with Actors() as actors:
            launcher = way(actors, prompts)
            for found, measure in zip(results, measures, strict=True):
                found += measure(name, launcher)
                print(name, {(one["name"], one["config"]): one["reps"] for one in found}, flush=True)
    return results


def measure_launcher(lengths: tuple[int, int], reps: int, name: str, launcher: InLauncher) -> list[dict[str, Any]]:
    """Measure rollouts with short and with long responses, and fit the costs of a token and of an episode."""
    units = {"CPU per token": "ns", "CPU per episode": "us", "bytes per token": "B", "bytes per episode": "B"}
    scripts = [Script(0.01, max(length // 20, 1), length) for length in lengths]
    costs = [list(_steps(launcher, script, reps)) for script in scripts]
    fitted: dict[str, list[float]] = {unit: [] for unit in units}
    episodes = launcher.episodes
    for (tokens, *short), (more_tokens, *long) in zip(*costs, strict=True):
        for what, scale, low, high in zip(("CPU", "bytes"), (1e-9, 1), short, long, strict=True):
            per_token = (high - low) / (more_tokens - tokens)
            per_episode = (low - per_token * tokens) / episodes
            fitted[f"{what} per token"].append(per_token / scale)
            fitted[f"{what} per episode"].append(per_episode / (1e3 * scale if what == "CPU" else 1))
    results = [record.result(what, name, units[what], values) for what, values in fitted.items()]
    for length, steps in zip(lengths, costs, strict=True):
        setting = f"{name}, {episodes} responses of {length:,} tokens on average"
        results.append(record.result("CPU of a rollout", setting, "s", [cpu_s for _, cpu_s, _ in steps]))
    return results


def _steps(launcher: InLauncher, script: Script, reps: int) -> Iterator[tuple[int, float, int]]:
    """Yield tokens, CPU time of this process and bytes of its messages, for each step after the first."""
    for step in _warmed_up(launcher, script, reps):
        began = time.process_time()
        rollout = launcher.step(step)
        cpu_s = time.process_time() - began
        yield rollout.generated, cpu_s, launcher.take_bytes()


def _warmed_up(launcher: InLauncher, script: Script, reps: int) -> range:
    """Take a step with the script, and return the numbers of the next ones."""
    launcher.follow(script)
    launcher.step(1)
    launcher.take_bytes()
    return range(2, reps + 2)


def measure_replay(length: int, reps: int, name: str, launcher: InLauncher) -> list[dict[str, Any]]:
    """Measure the bytes that rollouts with routed experts have more than those without."""
    plain = Script(0.01, max(length // 20, 1), length)
    without, experts = (list(_sizes(launcher, one, reps)) for one in (plain, replace(plain, experts=EXPERTS)))
    results = []
    for place, what in enumerate(("messages", "peak of memory")):
        more = [(much[place + 1] - one[place + 1]) / one[0] for one, much in zip(without, experts, strict=True)]
        results.append(record.result(what, name, "B per token", more))
    return results


def _sizes(launcher: InLauncher, script: Script, reps: int) -> Iterator[tuple[int, int, int]]:
    """Yield tokens of prompts and responses, bytes of messages and the peak of memory, for each step after the
    first."""
    for step in _warmed_up(launcher, script, reps):
        tracemalloc.start()
        rollout, (_, peak) = launcher.step(step), tracemalloc.get_traced_memory()
        tracemalloc.stop()
        yield int(rollout.metrics()["total_num_tokens"]), launcher.take_bytes(), peak


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["engines", "launcher", "replay"])
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 128, 512])
    parser.add_argument("--each", type=int, nargs="+", default=[512, 8], help="engines of a queue")
    parser.add_argument("--tokens", type=int, default=8_000, help="mean length of responses")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of an engine's step, for 40 tokens/s")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--reps", type=int, default=3)
    given = parser.parse_args(arguments)
    with runtime():
        match given.what:
            case "engines":
                script = Script(given.step, round(given.step * 40), given.tokens)
                kinds = dict.fromkeys((count, min(each, count)) for each in given.each for count in given.engines)
                results = [measure_engines(*kind, script, given.seconds, given.reps) for kind in kinds]
                write_engines(list(chain.from_iterable(results)), script)
            case "launcher":
                lengths = (given.tokens // 8, given.tokens)
                write_launcher(*measure_ways(128, partial(measure_launcher, lengths, given.reps)))
            case "replay":
                write_replay(*measure_ways(8, partial(measure_replay, given.tokens // 16, given.reps)))


def write_engines(results: list[dict[str, Any]], script: Script) -> None:
    busy = [one for one in results if one["name"] == "busy"]
    bars = [record.bar(f"busy, {busy[-1]['config']}", busy[-1]["median"], 0.98, True)]
    record.write(f"plane-engines-{script.mean}-tokens", results, bars)


def write_launcher(results: list[dict[str, Any]]) -> None:
    way = list(WAYS)[-1]
    found = {one["name"]: one["median"] for one in results if one["config"] == way}
    bars = {"CPU per token": 20, "bytes per token": 1, "CPU per episode": 200}
    named = [record.bar(f"{way}: {name}", found[name], target, False) for name, target in bars.items()]
    record.write("plane-launcher", results, named)


def write_replay(results: list[dict[str, Any]]) -> None:
    way = list(WAYS)[-1]
    bars = [record.bar(f"{way}: {one['name']}", one["median"], 0, False) for one in results if one["config"] == way]
    record.write("plane-replay", results, bars)


def trial() -> None:
    """Measure four engines, and each way with short responses."""
    with runtime():
        script = Script(0.02, 4, 100)
        # Engines are full within a few of these steps.
        here = sys.modules[__name__]
        with patch.object(here, "PROCESSES", 1), patch.object(here, "_LOOK_S", 0.3):
            write_engines(measure_engines(4, 2, script, 0.5, 1), script)
        launcher, replay = measure_ways(2, partial(measure_launcher, (20, 200), 1), partial(measure_replay, 50, 1))
        write_launcher(launcher)
        write_replay(replay)


if __name__ == "__main__":
    record.start(main, trial)
