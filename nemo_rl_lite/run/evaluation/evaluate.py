"""Ask a model the held-out problems several times, through the same collector and rewards as in training."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.sizes import engines
from nemo_rl_lite.data.formats import problems
from nemo_rl_lite.data.odd_texts import check_stop_strings
from nemo_rl_lite.data.problems import FileSet, Problem
from nemo_rl_lite.data.sources import TASKS, validation_set
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.redaction import described
from nemo_rl_lite.rewards.judge import Judge, make_judge, try_reward
from nemo_rl_lite.rewards.program import check_programs
from nemo_rl_lite.rollout.collector import ErrorShares, GroupSelection, RolloutCollector, RolloutTask
from nemo_rl_lite.rollout.episode import Rollout
from nemo_rl_lite.rollout.prompts import fitting_prompts
from nemo_rl_lite.rollout.store import RolloutFiles
from nemo_rl_lite.run.chat_keys import chat_tokenizer
from nemo_rl_lite.run.evaluation.engines import running_engines
from nemo_rl_lite.run.evaluation.folder import OUTPUT, Journal, claim, write_json
from nemo_rl_lite.run.evaluation.summary import show, summarize
from nemo_rl_lite.run.evaluation.task import Evaluation
from nemo_rl_lite.run.folder import locked
from nemo_rl_lite.run.jobs.playing import Playing

SUMMARY_FILE = "summary.json"


def evaluate(evaluation: Evaluation, folder: Path, console: RunConsole) -> dict[str, Any]:
    """Sample what the folder does not have yet, write its files, print the table, and return the numbers.

    Raises:
        ConfigError, DataError: the folder is another evaluation's; the data, the reward or the environment cannot be
            used, or fails too often.
        EngineError, WorkerError: the engine failed.
    """
    claim(folder, evaluation.identity())
    with locked(folder, OUTPUT):
        began = time.monotonic()
        playing, judge = Playing(evaluation.config), make_judge(evaluation.config.reward)
        tokenizer = chat_tokenizer(evaluation.served.folder, evaluation.config)
        asked = _problems(evaluation, playing, judge, tokenizer, console)
        journal = Journal(folder, asked)
        if journal.done:
            console.say(f"{len(journal.done)} of {len(asked)} problems are in {folder} already")
        if len(journal.done) == len(asked):
            episodes = [episode for number in range(len(asked)) for episode in journal.done[number]]
            rollout = Rollout(episodes, evaluation.options.samples, reward_errors=0)
        else:
            rollout = _sampled(evaluation, asked, journal, playing, judge, tokenizer, folder, console)
        RolloutFiles(folder, None, 0).write(0, "validation", rollout)
        found = summarize(rollout, evaluation.options.pass_reward)
        sampling = asdict(evaluation.sampling(tokenizer.end_tokens))
        about = {
            "model": str(evaluation.served.folder),
            "data": described(evaluation.config.data),
            "sampling": sampling,
        }
        seconds = {"seconds": time.monotonic() - began}
        write_json(folder / SUMMARY_FILE, about | {"seed": evaluation.config.algorithm.seed} | found | seconds)
    title = f"{evaluation.served.name} on {evaluation.config.data.name}: {len(asked)} problems"
    show(found, title, console)
    console.say(f"{folder} has {SUMMARY_FILE} and every response")
    return found


def _problems(
    evaluation: Evaluation, playing: Playing, judge: Judge, tokenizer: ChatTokenizer, console: RunConsole
) -> Sequence[Problem]:
    """The problems to ask, as a run checks them before it starts anything."""
    config = evaluation.config
    all_of_it = config.algorithm.max_val_samples if config.data.name in TASKS else sys.maxsize
    limit = evaluation.options.problems or all_of_it
    asked = validation_set(config.data, limit, problems(playing.tools))
    if any(problem.tools for problem in asked):
        tokenizer.check_tools()
    with console.busy("checking that every prompt fits", announced=False):
        _, asked = fitting_prompts(FileSet((), 0, False), asked, tokenizer, config)
    check_stop_strings(tokenizer, config.generation.stop_strings)
    check_programs(config.reward, FileSet(tuple(asked), 0, False))
    try_reward(judge, asked[0])
    return asked


def _sampled(
    evaluation: Evaluation,
    asked: Sequence[Problem],
    journal: Journal,
    playing: Playing,
    judge: Judge,
    tokenizer: ChatTokenizer,
    folder: Path,
    console: RunConsole,
) -> Rollout:
    config, samples, count = evaluation.config, evaluation.options.samples, engines(evaluation.config)
    wanted = GroupSelection(asked.__getitem__, len(asked), samples)
    task = RolloutTask(wanted, evaluation.sampling(tokenizer.end_tokens), config.algorithm.seed, journal.done)
    with ExitStack() as stack:
        with console.busy(f"starting {evaluation.served}" + (f", {count} engines" if count > 1 else "")):
            started = stack.enter_context(running_engines(evaluation.served, folder, console.say))
        generation, play = stack.enter_context(playing.through(started, tokenizer, folder, console.say))
        part = config.agent if play.section == "agent" else config.environment
        shares = ErrorShares(config.reward.max_error_share, part.max_error_share)
        longest = config.policy.max_total_sequence_length
        collector = RolloutCollector(generation, tokenizer, judge, longest, shares, play)
        with console.busy(f"sampling {samples} response(s) to each of {len(asked)} problems") as tell:

            def shown(progress: str) -> None:
                tell(progress)
                journal.keep(task.groups)

            try:
                return collector.collect(task, shown)
            finally:
                journal.keep(task.groups, at_once=True)
