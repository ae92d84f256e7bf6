"""`nrl-lite rehearse [options] [group=file ...] [key.path=value ...]`: play episodes with a scripted policy.

Runs agent, environment, tools and reward of a configuration on this machine, without engine, GPU or weights. Prints the
episodes, and the faults that would hurt a run.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from nemo_rl_lite.compat.imports import quick_imports
from nemo_rl_lite.config.experiments import as_words, expanded
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.config.sources import naming_source, source_configs
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import ConfigError, Violation, printable, shown_as_message
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.rehearsal.findings import Finding, findings
from nemo_rl_lite.rehearsal.stage import Played, for_rehearsal, rehearse, temporary_folder
from nemo_rl_lite.run.jobs import GRPOJob
from nemo_rl_lite.run.model import starting_model, with_chosen_template
from nemo_rl_lite.system.pool import ending_pools
from nemo_rl_lite.validation.compose import compose_config

FOUND = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 no fault, 1 faults, 2 bad configuration, data or arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite rehearse", description=__doc__, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", help="as for train")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print the training rows of the first N episodes"
    )
    limit = "time limit of an agent's episode and of an environment's call, in seconds (default: %(default)g)"
    parser.add_argument("--seconds", type=float, default=10.0, help=limit)
    parser.add_argument("--json", action="store_true", help="write only a JSON object to stdout")
    given = parser.parse_intermixed_args(as_words(sys.argv[1:] if arguments is None else arguments))
    with shown_as_message("nrl-lite rehearse"):
        if not given.seconds > 0:
            fix = "leave it out for the default"
            raise ConfigError([Violation("--seconds", given.seconds, "must be positive", fix)])
        config = compose_config(expanded(given.overrides))
        if not isinstance(config.algorithm, GRPOConfig):
            rule = "plays no episodes, so there is nothing to rehearse"
            raise ConfigError([Violation("algorithm", config.algorithm.name, rule, "algorithm=grpo")])
        console = RunConsole(Console(stderr=True)) if given.json else RunConsole()
        parts = [
            _played(name, for_rehearsal(own, given.seconds), console) for name, own in source_configs(config).items()
        ]
    if given.json:
        sys.stdout.write(json.dumps(_record(parts)) + "\n")
    else:
        for part in parts:
            _show(part, console, given.show)
    sys.exit(FOUND if any(one.level == "fault" for part in parts for one in part.findings) else 0)


@dataclass(frozen=True)
class _Part:
    """The episodes of a source, and what they say of its code."""

    source: str
    episodes: Sequence[Played]
    findings: Sequence[Finding]
    tokenizer: ChatTokenizer


def _played(source: str, config: Config, console: RunConsole) -> _Part:
    """Play the episodes of a source."""
    with tempfile.TemporaryDirectory() as own, temporary_folder() as temporary, ending_pools(), naming_source(source):
        folder = Path(own)
        with quick_imports():
            model = starting_model(config, console, untrained=folder)
            model = with_chosen_template(config, model, folder, console.say)
            job = GRPOJob(config, folder, console, model)
        with console.busy("playing episodes with a scripted policy"):
            found = rehearse(job, config, temporary)
    return _Part(source, found.episodes, findings(found), job.tokenizer)


def _record(parts: Sequence[_Part]) -> dict[str, Any]:
    return {
        "episodes": [{"source": part.source} | _cells(one) for part in parts for one in part.episodes],
        "findings": [{"source": part.source} | asdict(one) for part in parts for one in part.findings],
    }


def _show(part: _Part, console: RunConsole, rows_of: int) -> None:
    """Print the episodes, the rows of the first `rows_of`, and the findings."""
    cells = [_cells(one) for one in part.episodes]
    title = f"episodes of {part.source}" if part.source else "episodes"
    console.table(title, list(cells[0]), [[_shown(value) for value in one.values()] for one in cells])
    for number, one in enumerate(part.episodes[:rows_of], start=1):
        for row, text in enumerate(_rows(one, part.tokenizer), start=1):
            console.say(f"episode {number} ({one.script.name}), row {row}, trained text in brackets:")
            console.console.print(text)
    for one in part.findings:
        console.say(f"{one.level}: {one.what}\n    in: {one.where}\n    fix: {one.fix}")
    count = sum(one.level == "fault" for one in part.findings)
    console.say(f"{len(part.episodes)} episodes, {count} fault{'' if count == 1 else 's'}")


def _cells(one: Played) -> dict[str, Any]:
    """Return the columns of an episode."""
    return {
        "script": one.script.name,
        "responses": one.turns,
        "rows": one.episode.row_count,
        "trained tokens": one.trained,
        "other tokens": one.episode.length - one.trained,
        "reward": one.episode.reward,
        "ending": one.episode.ending,
        "seconds": one.seconds,
    }


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _rows(one: Played, tokenizer: ChatTokenizer) -> Iterator[Text]:
    """Yield the text of each row. Trained text has brackets and, in a terminal, a colour."""

    def text_of(tokens: Sequence[int]) -> str:
        return printable("".join(map(tokenizer.piece, tokens)), kept="\n")

    for segment in one.segments:
        text, place = Text(), 0
        for start, completion in segment.turns:
            text.append(text_of(segment.tokens[place:start]), style="dim")
            place = start + len(completion.tokens)
            text.append(f"[{text_of(segment.tokens[start:place])}]", style="bold green")
        yield text.append(text_of(segment.tokens[place:]), style="dim")


if __name__ == "__main__":
    main()
