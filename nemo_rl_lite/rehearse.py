"""`nrl-lite rehearse [options] [group=file ...] [key.path=value ...]`: play episodes with a scripted policy.

Runs agent, environment, tools and reward of a configuration on this machine, without engine, GPU or weights. Prints the
episodes with their training rows, and the faults that would hurt a run.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from nemo_rl_lite.config.experiments import as_words, expanded
from nemo_rl_lite.errors import ConfigError, Violation, shown_as_message
from nemo_rl_lite.validation.compose import compose_config

FOUND = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 no fault, 1 faults, 2 bad configuration, data or arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite rehearse", description=__doc__, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", help="as for train")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the rows of the first N episodes")
    limit = "time limit of a call of agent or environment, in seconds (default: %(default)g)"
    parser.add_argument("--seconds", type=float, default=10.0, help=limit)
    parser.add_argument("--json", action="store_true", help="write only a JSON object to stdout")
    given = parser.parse_intermixed_args(as_words(sys.argv[1:] if arguments is None else arguments))
    with shown_as_message("nrl-lite rehearse"):
        sys.exit(FOUND if _rehearse(given) else 0)


def _rehearse(given: argparse.Namespace) -> bool:
    """Return whether there are faults."""
    from nemo_rl_lite.config.schema_algorithm import GRPOConfig
    from nemo_rl_lite.observability.console import RunConsole
    from nemo_rl_lite.rehearsal.findings import findings
    from nemo_rl_lite.rehearsal.stage import for_rehearsal, rehearse, temporary_folder
    from nemo_rl_lite.run.jobs import GRPOJob
    from nemo_rl_lite.run.model import starting_model, with_chosen_template
    from nemo_rl_lite.system.pool import ending_pools

    config = compose_config(expanded(given.overrides))
    if not isinstance(config.algorithm, GRPOConfig):
        rule = "plays no episodes, so there is nothing to rehearse"
        raise ConfigError([Violation("algorithm", config.algorithm.name, rule, "algorithm=grpo")])
    console = RunConsole(sys.stderr if given.json else None)
    with tempfile.TemporaryDirectory() as own, temporary_folder() as temporary, ending_pools():
        config = for_rehearsal(config, given.seconds)
        model = starting_model(config, console, untrained=Path(own))
        model = with_chosen_template(config, model, Path(own), console.say)
        job = GRPOJob(config, Path(own), console, model)
        with console.busy("playing episodes with a scripted policy"):
            found = rehearse(job, config, temporary)
        faults = findings(found)
        if given.json:
            episodes = [dict(zip(_COLUMNS, _cells(one), strict=True)) for one in found.episodes]
            sys.stdout.write(json.dumps({"episodes": episodes, "findings": [asdict(one) for one in faults]}) + "\n")
            return any(one.level == "fault" for one in faults)
        console.table(
            "episodes with a scripted policy", list(_COLUMNS), [list(map(_shown, _cells(one))) for one in found.episodes]
        )
        for number, one in enumerate(found.episodes[: given.show], start=1):
            for row, text in enumerate(_rows(one, job.tokenizer), start=1):
                console.console.print(f"episode {number} ({one.script.name}), row {row}; trained text is marked:")
                console.console.print(text)
        for one in faults:
            console.say(f"{one.level}: {one.what}\n    in: {one.where}\n    fix: {one.fix}")
        console.say(f"{len(found.episodes)} episodes, {sum(one.level == 'fault' for one in faults)} faults")
    return any(one.level == "fault" for one in faults)


_COLUMNS = ("script", "responses", "rows", "tokens trained", "other tokens", "reward", "ending", "seconds")


def _cells(one) -> tuple:
    episode = one.episode
    rows = one.episode.row_count
    return one.script.name, one.turns, rows, one.trained, episode.length - one.trained, episode.reward, episode.ending, one.seconds


def _shown(cell: object) -> str:
    return "-" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _rows(one, tokenizer) -> Iterator[Text]:
    """Yield the text of each row, with trained text marked."""
    for segment in one.segments:
        text, place = Text(), 0
        for start, completion in segment.turns:
            text.append("".join(map(tokenizer.piece, segment.tokens[place:start])), style="dim")
            place = start + len(completion.tokens)
            text.append("[" + "".join(map(tokenizer.piece, segment.tokens[start:place])) + "]", style="bold green")
        text.append("".join(map(tokenizer.piece, segment.tokens[place:])), style="dim")
        yield text


if __name__ == "__main__":
    main()
