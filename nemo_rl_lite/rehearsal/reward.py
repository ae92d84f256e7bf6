"""Attack the reward of a configuration, and print what it pays for (`nrl-lite doctor`)."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_rl_lite.config.experiments import as_words, expanded
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.config.sources import ONLY, naming_source, source_configs
from nemo_rl_lite.data.formats import PROBLEMS
from nemo_rl_lite.data.rows import file_rows
from nemo_rl_lite.data.sources import training_set
from nemo_rl_lite.errors import ConfigError, DataError, Violation, printable, shown_as_message
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.rewards.checkup import Checkup, Finding, brief, check_up, limited
from nemo_rl_lite.rewards.judge import make_judge, try_reward
from nemo_rl_lite.rewards.samples import SampleStatistics, read_samples, score_samples
from nemo_rl_lite.rollout.store import read_rollout, rollout_files
from nemo_rl_lite.system.pool import ending_pools
from nemo_rl_lite.validation.compose import compose_config

FOUND = 1
# Most faults that are printed with their responses.
_SHOWN = 5


@dataclass(frozen=True)
class _Part:
    """The reward of a source, and what was found."""

    source: str
    checkup: Checkup
    statistics: SampleStatistics | None
    findings: Sequence[Finding]


def attack_reward(overrides: Sequence[str], problems: int, limit_s: float, samples: str | None, as_json: bool) -> int:
    """Attack the reward of each source on its first `problems`, and print the result. Return the exit status: 0 no
    fault, 1 faults. `samples`: run or file to score as well."""
    with shown_as_message("nrl-lite doctor"):
        config = compose_config(expanded(as_words(overrides)))
        _check(config, problems, limit_s)
        console = RunConsole(Console(stderr=True)) if as_json else RunConsole()
        rows = None if samples is None else list(_sample_rows(samples))
        parts = []
        for name, own in source_configs(config).items():
            with naming_source(name), ending_pools(), console.busy("attacking the reward"):
                parts.append(_examined(name, own, problems, limit_s, rows))
    if as_json:
        sys.stdout.write(json.dumps([_record(part) for part in parts]) + "\n")
    else:
        for part in parts:
            _show(part, console)
    return FOUND if any(one.level == "fault" for part in parts for one in part.findings) else 0


def _check(config: Config, problems: int, limit_s: float) -> None:
    """Raise ConfigError: there is no reward to attack, or an option has a wrong value."""
    found = []
    if not isinstance(config.algorithm, GRPOConfig):
        found.append(Violation("algorithm", config.algorithm.name, "uses no reward", "algorithm=grpo"))
    for own in source_configs(config).values():
        if own.agent.name is not None:
            rule = "may score its episodes itself, so the reward says little"
            found.append(Violation("agent.name", own.agent.name, rule, "nrl-lite rehearse, which plays the agent"))
    for option, value in (("--problems", problems), ("--seconds", limit_s)):
        if value <= 0:
            found.append(Violation(option, value, "must be positive", "leave it out for the default"))
    if found:
        raise ConfigError(found)


def _examined(name: str, config: Config, problems: int, limit_s: float, rows: Sequence | None) -> _Part:
    """Attack the reward of a source."""
    reward, options = limited(config.reward, limit_s), config.options(GRPOConfig)
    judge = make_judge(reward)
    training = training_set(config.data, options.seed, PROBLEMS)
    first = [training.problem(number) for number in range(min(problems, len(training.finite()) or problems))]
    try_reward(judge, first[0])
    checkup = check_up(judge, first, reward, config.generation.max_new_tokens, limit_s)
    # Rows of a mixture name their source.
    own = [(where, row) for where, row in rows or () if name == ONLY or row.get("source") in (None, name)]
    if not own:
        return _Part(name, checkup, None, checkup.findings)
    samples = read_samples(own, training, config.data.system_prompt)
    statistics, more = score_samples(judge, samples, reward, limit_s)
    return _Part(name, checkup, statistics, [*checkup.findings, *more])


def _sample_rows(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the training samples of a run, or the rows of a file. Raises DataError: there are none."""
    folder = Path(path).expanduser()
    if not (folder / "rollouts").is_dir():
        rows = list(file_rows(path))
        if not rows:
            raise DataError(f"{path}: no rows")
        yield from rows
        return
    files = [file for file in rollout_files(folder) if file.stem.endswith("-train")]
    if not files:
        raise DataError(f"{path}: has no rollouts of training; logger.log_samples = 0 writes none")
    for file in files:
        for number, row in enumerate(read_rollout(file), start=1):
            yield f"{file}, row {number}", row


def _record(part: _Part) -> dict[str, Any]:
    return {
        "source": part.source,
        "attacks": part.checkup.cells(),
        "unpaid_layouts": list(part.checkup.unpaid),
        "skipped": part.checkup.skipped,
        "samples": None if part.statistics is None else asdict(part.statistics),
        "findings": [asdict(one) for one in part.findings],
    }


def _show(part: _Part, console: RunConsole) -> None:
    cells = part.checkup.cells()
    title = f"reward of {part.source}" if part.source else "reward"
    if cells:
        console.table(title, list(cells[0]), [[_shown(value) for value in one.values()] for one in cells])
    if part.statistics is not None:
        values = [(name.replace("_", " "), _shown(value)) for name, value in asdict(part.statistics).items()]
        console.table("samples", ("statistic", "value"), values)
    if part.checkup.unpaid:
        console.say("right answers that get at most half of the scale:")
    for text in part.checkup.unpaid:
        console.say(f"    {printable(brief(text))}")
    faults = [one for one in part.findings if one.level == "fault"]
    for one in [*faults[:_SHOWN], *(one for one in part.findings if one.level == "note")]:
        _show_finding(one, console)
    if more := faults[_SHOWN:]:
        console.say(f"{len(more)} more faults: {', '.join(one.attack for one in more)}; --json has the responses")
    if part.checkup.skipped:
        console.say(f"{part.checkup.skipped} responses were not scored in the time: --seconds")
    console.say(f"{len(part.checkup.scores)} responses, {len(faults)} fault{'' if len(faults) == 1 else 's'}")


def _show_finding(one: Finding, console: RunConsole) -> None:
    shown = f"\n    response: {printable(one.response)}" if one.response else ""
    console.say(f"{one.level}: {printable(one.what)}{shown}\n    fix: {one.fix}")


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
