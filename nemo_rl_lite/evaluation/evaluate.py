"""Sample responses to the held-out problems, and score them as in training."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nemo_rl_lite.checkpoint.resume import changed
from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.runtime import place, ray_runtime
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.compat.ray import lost_process
from nemo_rl_lite.config.sizes import engine_hosts, engines
from nemo_rl_lite.config.sources import ONLY
from nemo_rl_lite.data.formats import problems
from nemo_rl_lite.data.problems import FileSet, Problem
from nemo_rl_lite.data.sources import validation_set
from nemo_rl_lite.data.tasks import TASKS
from nemo_rl_lite.data.tokenizer import ChatTokenizer, check_stop_strings
from nemo_rl_lite.errors import CheckpointError, ConfigError, DataError, Violation, WorkerError
from nemo_rl_lite.evaluation.task import Evaluation
from nemo_rl_lite.generation.interface import Generation, Requests
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.environment import described
from nemo_rl_lite.observability.liveness import watched
from nemo_rl_lite.observability.runs import is_run
from nemo_rl_lite.rollout.collector import RolloutCollector, RolloutTask
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.groups import Group
from nemo_rl_lite.rollout.playing import Playing, error_shares
from nemo_rl_lite.rollout.rollout import RESAMPLES, Rollout, fetched, interval, ks, pass_at_k, passes
from nemo_rl_lite.rollout.sampler import fitting_prompts
from nemo_rl_lite.rollout.saved import SavedGroup, load_groups, save_groups
from nemo_rl_lite.rollout.store import RolloutFiles
from nemo_rl_lite.run.folder import locked
from nemo_rl_lite.run.model import chat_tokenizer
from nemo_rl_lite.run.serving import Served, start_engine
from nemo_rl_lite.validation.notes import notes_here, show_notes
from nemo_rl_lite.workers.generation import RemoteGeneration
from nemo_rl_lite.workers.reserve import generation_group, load_generation, start_engines

OUTPUT = "--output"
IDENTITY_FILE, GROUPS = "evaluation.json", "groups"
# Seconds between two writes of finished groups.
_EVERY_S = 5.0
SUMMARY_FILE = "summary.json"
_INTERVALS = f"95 %: percentiles of {RESAMPLES} resamples of the problems, with a fixed seed"
Say = Callable[[str], None]


@dataclass(frozen=True)
class AwakeEngines:
    """`Generation` by engines on their own devices."""

    queue: RequestQueue

    def serving(self) -> AbstractAsyncContextManager[Requests]:
        return self.queue.serving()

    def finish_generation(self) -> dict[str, float]:
        return {}


@contextmanager
def running_engines(served: Served, folder: Path, say: Say) -> Iterator[Generation]:
    """Start the configured engines. Several engines, or hosts of one, are actors that write to `folder/logs`.
    They run until the block ends.

    Raises:
        WorkerError: there are too few GPUs, an engine does not start, or all engines have died too often.
    """
    if engines(served.config) == engine_hosts(served.config) == 1:
        queue, _ = start_engine(served)
        yield AwakeEngines(queue)
        return
    with ray_runtime(), watched(_last_words, lost_process):
        yield AwakeEngines(EngineActors(served, folder, say).queue)


class EngineActors:
    """Engines in actors. If one dies, the others take over its requests. If none is left, all restart, at most
    `cluster.max_restarts` times."""

    def __init__(self, served: Served, folder: Path, say: Say):
        self._served, self._say = served, say
        self._left = served.config.cluster.max_restarts
        self._lost: dict[int, WorkerError] = {}
        config = served.config
        self._group = generation_group(config, place(config, engines(config)), folder)
        self._start(self._group)
        self._engines = RemoteGeneration(self._group, shares_device=False)
        capacity = config.generation.vllm_cfg.max_num_seqs
        self.queue = RequestQueue(self._engines.replicas, capacity, self._note_loss, self._restore)

    def _start(self, group: WorkerGroup) -> None:
        config, limit = self._served.config, self._served.config.cluster.start_timeout_s
        wait(load_generation(config, group), timeout_s=limit)
        wait(start_engines(config, group, self._served.folder), timeout_s=limit)

    def _note_loss(self, rank: int, error: WorkerError) -> None:
        self._lost[rank] = error
        if len(self._lost) < len(self._group):
            self._say(f"{error}; the other engines take over its requests")

    def _restore(self) -> None:
        ranks, error = sorted(self._lost), next(reversed(self._lost.values()))
        if not self._left:
            raise error
        self._left -= 1
        self._say(f"{error}; no engine is left: restarting ({self._left} restarts left, cluster.max_restarts)")
        try:
            self._start(self._group.replace(ranks))
        except WorkerError as failure:
            self._say(f"the restart failed: {failure}")
            raise error from failure
        self._engines.renew(ranks)
        self.queue.replaced(ranks)
        self._lost.clear()


def _last_words(error: WorkerError) -> None:
    """Print the error if the main thread no longer reacts."""
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()


def claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Record the evaluation in its folder, or check that the folder belongs to it. A folder without samples is reused.

    Raises:
        ConfigError: the folder is a run's, has other files, or samples of another evaluation; names the changed keys.
    """
    if is_run(folder):
        raise ConfigError([Violation(OUTPUT, str(folder), "is the folder of a run", f"{OUTPUT} ANOTHER_FOLDER")])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / IDENTITY_FILE
    if not file.exists() and any(folder.iterdir()):
        rule = "is neither empty nor the folder of an evaluation"
        raise ConfigError([Violation(OUTPUT, str(folder), rule, f"{OUTPUT} ANOTHER_FOLDER")])
    if not any((folder / GROUPS).glob("*.parquet")):
        write_json(file, identity)
        return
    for key, (before, now) in changed(json.loads(file.read_text()), identity, ignored=()).items():
        rule = f"the evaluation in {folder} was started with {before!r}, and the samples would be mixed"
        raise ConfigError([Violation(key, now, rule, f"the same value, or another folder: {OUTPUT} FOLDER")])


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(file)


class Journal:
    """Writes complete groups, each the samples of a problem, to `groups/*.parquet`. If a reward, an environment or an
    agent failed, the next command samples the group again."""

    def __init__(self, folder: Path, problems: Sequence[Problem]):
        """Raises:
        CheckpointError: a file cannot be read.
        ConfigError: the groups are of other problems.
        """
        self._folder, self._kept_at = folder / GROUPS, -math.inf
        self._folder.mkdir(exist_ok=True)
        self.done: dict[int, SavedGroup] = {}
        try:
            for file in sorted(self._folder.glob("*.parquet")):
                self.done |= load_groups(file)
            episodes = {number: group.read() or [] for number, group in self.done.items()}
        except (OSError, pa.ArrowException) as error:
            raise CheckpointError(f"{self._folder} cannot be read: {error}. Remove the folder to restart") from None
        self.episodes: dict[int, list[Episode]] = episodes
        for number, own in episodes.items():
            if number >= len(problems) or _asked(own[0].problem) != _asked(problems[number]):
                rule = f"has changed since the evaluation in {folder} started"
                raise ConfigError([Violation("data", None, rule, f"{OUTPUT} ANOTHER_FOLDER")])
        self._kept = set(self.done)

    def keep(self, groups: Sequence[Group], at_once: bool = False) -> None:
        """Write the new complete groups, every few seconds or `at_once`. Raises OSError."""
        if not at_once and time.monotonic() - self._kept_at < _EVERY_S:
            return
        new = {
            number: fetched(group.episodes, None)
            for number, group in enumerate(groups)
            if group.is_done
            and number not in self._kept
            and all(episode.reward is not None for episode in group.episodes)
        }
        if new:
            # Readers of the folder see only complete files.
            partial, place = self._folder / ".partial", len(list(self._folder.glob("*.parquet")))
            partial.mkdir(exist_ok=True)
            file = partial / f"rollout-{place:08d}.parquet"
            save_groups(file, new)
            file.replace(self._folder / file.name)
            self._kept |= set(new)
        self._kept_at = time.monotonic()


def _asked(problem: Problem) -> list[Any]:
    return json.loads(json.dumps([problem.messages, problem.answer], default=str))


def summarize(rollout: Rollout, pass_reward: float) -> dict[str, Any]:
    """Return the metrics of all samples. Lengths are in tokens. Raises DataError: no response has a reward."""
    samples = rollout.samples_per_prompt
    rewards_PK = rollout.rewards_B.view(-1, samples).numpy()
    judged_PK = ~np.isnan(rewards_PK)
    if not judged_PK.any():
        raise DataError("no response has a reward: the log above has the first error")
    problems, metrics = len(rewards_PK), rollout.metrics()
    passed_P = passes(rewards_PK, pass_reward).sum(axis=1)
    average = float(np.nanmean(rewards_PK))
    at_k = {k: pass_at_k(passed_P, samples, k) for k in ks(samples)}
    return {
        "problems": problems,
        "samples": samples,
        "intervals": _INTERVALS,
        "avg": _number(average, *interval(np.nansum(rewards_PK, axis=1), judged_PK.sum(axis=1))),
        "pass_reward": pass_reward,
        "pass_at_k": {
            str(k): _number(float(found_P.mean()), *interval(found_P, np.ones(problems))) for k, found_P in at_k.items()
        },
        "reward_parts": {key: value for key, value in metrics.items() if key.startswith("reward/")},
        "episode_metrics": rollout.episode_metrics(),
        "mean_length": metrics["mean_gen_tokens_per_sample"],
        "max_length": metrics["max_gen_tokens_per_sample"],
        "truncated_share": metrics["truncation_rate"],
        "reward_errors": rollout.reward_errors,
        "environment_errors": rollout.environment_errors,
    }


def show(found: Mapping[str, Any], title: str, console: RunConsole) -> None:
    samples, rows = found["samples"], list[tuple[str, str, str]]()
    rows.append((f"avg@{samples}", *_shown(found["avg"])))
    rows += [(f"pass@{k}", *_shown(one)) for k, one in found["pass_at_k"].items()]
    means = found["reward_parts"] | found["episode_metrics"]
    rows += [(name, f"{value:.4f}", "") for name, value in means.items()]
    rows.append(("mean length (tokens)", f"{found['mean_length']:.1f}", ""))
    rows.append(("truncated", f"{found['truncated_share']:.2%}", ""))
    rows.append(("reward errors", str(found["reward_errors"]), ""))
    if found["environment_errors"]:
        rows.append(("environment errors", str(found["environment_errors"]), ""))
    console.table(title, ("", "value", "95 % interval"), rows)


def _number(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def _shown(one: Mapping[str, float]) -> tuple[str, str]:
    return f"{one['value']:.4f}", f"{one['low']:.4f} to {one['high']:.4f}"


def evaluate(evaluation: Evaluation, folder: Path, console: RunConsole) -> dict[str, Any]:
    """Sample the missing responses, write the folder's files, print the table, and return the metrics.

    Raises:
        ConfigError, DataError: the folder belongs to another evaluation; data, reward or environment cannot be used, or
            fail too often.
        EngineError, WorkerError: an engine failed.
    """
    claim(folder, evaluation.identity())
    with locked(folder, OUTPUT):
        began = time.monotonic()
        playing = Playing(evaluation.config)
        tokenizer = chat_tokenizer(evaluation.served.folder, evaluation.config)
        asked = _problems(evaluation, playing, tokenizer, console)
        console.say(evaluation.describe(len(asked)))
        journal = Journal(folder, asked)
        if journal.done:
            console.say(f"{len(journal.done)} of {len(asked)} problems are done in {folder}")
        if len(journal.done) == len(asked):
            episodes = [episode for number in range(len(asked)) for episode in journal.episodes[number]]
            rollout = Rollout(episodes, evaluation.options.samples, reward_errors=0)
        else:
            rollout = _sampled(evaluation, asked, journal, playing, tokenizer, folder, console)
        RolloutFiles(folder, None, 0).write(0, "validation", rollout)
        found = summarize(rollout, evaluation.options.pass_reward)
        about = {
            "model": str(evaluation.served.folder),
            "data": described(evaluation.config.data),
            "sampling": asdict(evaluation.sampling(tokenizer.end_tokens)),
            "seed": evaluation.config.algorithm.seed,
        }
        write_json(folder / SUMMARY_FILE, about | found | {"seconds": time.monotonic() - began})
    title = f"{evaluation.served.name} on {evaluation.config.data.name}: {len(asked)} problems"
    show(found, title, console)
    console.say(f"{folder} has {SUMMARY_FILE} and every response")
    return found


def _problems(
    evaluation: Evaluation, playing: Playing, tokenizer: ChatTokenizer, console: RunConsole
) -> Sequence[Problem]:
    """Return the problems, checked as in a training run."""
    config = evaluation.config
    all_of_it = config.algorithm.max_val_samples if config.data.name in TASKS else sys.maxsize
    limit = evaluation.options.problems or all_of_it
    asked = validation_set(config.data, limit, problems(playing.tools[ONLY]))
    if any(problem.tools for problem in asked):
        tokenizer.check_tools()
    with console.busy("checking that every prompt fits", announced=False):
        _, asked = fitting_prompts(FileSet((), 0, False), asked, tokenizer, config)
    check_stop_strings(tokenizer, config.generation.stop_strings)
    show_notes(notes_here(config))
    playing.try_reward(asked[0])
    return asked


def _sampled(
    evaluation: Evaluation,
    asked: Sequence[Problem],
    journal: Journal,
    playing: Playing,
    tokenizer: ChatTokenizer,
    folder: Path,
    console: RunConsole,
) -> Rollout:
    config, samples, count = evaluation.config, evaluation.options.samples, engines(evaluation.config)
    sampling, seed = evaluation.sampling(tokenizer.end_tokens), config.algorithm.seed
    task = RolloutTask(asked.__getitem__, len(asked), samples, sampling, seed, saved=journal.done)
    with ExitStack() as stack:
        with console.busy(f"starting {evaluation.served}" + (f", {count} engines" if count > 1 else "")):
            started = stack.enter_context(running_engines(evaluation.served, folder, console.say))
        players = stack.enter_context(playing.players(started, tokenizer, folder, console.say))
        collector = RolloutCollector(players, error_shares(evaluation.config))
        with console.busy(f"sampling {samples * len(asked)} responses") as tell:

            def shown(progress: str) -> None:
                tell(progress)
                journal.keep(task.groups)

            try:
                return collector.collect(task, shown)
            finally:
                journal.keep(task.groups, at_once=True)
