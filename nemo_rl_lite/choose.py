"""`nrl-lite choose [options] [group=file ...] [key.path=value ...]`: choose engine settings within a mismatch budget.

Runs the first steps of a training once per candidate: FP8 weights, an FP8 KV cache, attention kernels, router replay.
Prints mismatch and speed of each, and the keys of the fastest one within `generation.max_gen_kl`.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nemo_rl_lite.config.experiments import as_words, expanded
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.errors import ConfigError, Violation, shown_as_message
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.run.choosing import LEAST_STEPS, Estimate, Measured, candidates, choose, measure
from nemo_rl_lite.run.command import Flags, checked, folder_of
from nemo_rl_lite.validation.compose import compose_config

FILE = "choose.json"
NONE_WITHIN = 1
# A warm-up, and two steps for a standard error.


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 chosen, 1 no candidate within the budget, 2 bad configuration or arguments."""
    given_arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="nrl-lite choose", description=__doc__, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", help="as for train, with generation.max_gen_kl=NATS")
    parser.add_argument(
        "--try",
        action="append",
        dest="tried",
        type=_words,
        metavar="OVERRIDES",
        help="candidate instead of the usual ones; may be repeated. The given configuration is always one",
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of a candidate; the first is a warm-up (default: 6)"
    )
    given = parser.parse_intermixed_args(as_words(given_arguments))
    if given.steps < LEAST_STEPS:
        parser.error(f"--steps must be at least {LEAST_STEPS}")
    with shown_as_message("nrl-lite choose"):
        overrides = expanded(given.overrides)
        [(_, config)] = checked(Flags(()), overrides)
        budget, folder = _budget(config), _new_folder(overrides)
        tried = candidates(config) if given.tried is None else _own_candidates(overrides, given.tried)
        console = RunConsole()
        command = shlex.join(["nrl-lite", "choose", *given_arguments])
        measured = list[Measured]()
        for number, own in enumerate(tried):
            console.say(f"candidate {number + 1} of {len(tried)}: {' '.join(own) or 'as given'}")
            measured.append(measure(overrides, own, given.steps, folder / str(number), command))
        chosen = choose(measured, budget)
        record = {"budget": budget, "chosen": None if chosen is None else chosen.overrides}
        record |= {"candidates": [asdict(one) for one in measured]}
        (folder / FILE).write_text(json.dumps(record, indent=2))
    _show(measured, chosen, budget, console)
    sys.exit(NONE_WITHIN if chosen is None else 0)


def _budget(config: Config) -> float:
    if not isinstance(config.algorithm, GRPOConfig):
        rule = "samples no responses, so engines have no part in it"
        raise ConfigError([Violation("algorithm", config.algorithm.name, rule, "algorithm=grpo")])
    if (budget := config.generation.max_gen_kl) is None:
        key = "generation.max_gen_kl"
        raise ConfigError([Violation(key, None, "is the budget, in nats per token", f"{key}=5e-3")])
    return budget


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _own_candidates(overrides: Sequence[str], tried: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the given configuration and the user's candidates. Raises ConfigError: one is invalid."""
    for own in tried:
        compose_config([*overrides, *own])
    return [(), *tried]


def _new_folder(overrides: Sequence[str]) -> Path:
    folder = folder_of(overrides)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError([Violation("hydra.run.dir", str(folder), "is not empty", "name a new folder")])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _show(measured: Sequence[Measured], chosen: Measured | None, budget: float, console: RunConsole) -> None:
    """Print a row for each candidate, the reasons of failures, and the keys to set."""
    rows = []
    for one in measured:
        result = "failed" if one.failure else "within" if one.is_within(budget) else "above"
        result = "chosen" if one is chosen else result
        rows.append([one.name, _shown(one.mismatch, ".2g", ".1g"), _shown(one.rate, ",.0f", ",.0f"), result])
    headers = ["settings", "gen_kl_error", "tokens/s", "budget"]
    title = f"engine settings: gen_kl_error in nats, with a budget of {budget:g}; ± standard error"
    console.table(title, headers, rows)
    for one in measured:
        if one.failure:
            console.say(f"failed   {one.name}: {one.failure}")
    if chosen is None:
        console.say("no candidate is within the budget: raise generation.max_gen_kl, or correct the mismatch")
    elif chosen.overrides:
        console.say(f"take     {shlex.join(chosen.overrides)}")
    else:
        console.say("take     the configuration as given: no other candidate within the budget is faster")


def _shown(one: Estimate | None, of_mean: str, of_error: str) -> str:
    return "-" if one is None else f"{one.mean:{of_mean}} ± {one.error:{of_error}}"


if __name__ == "__main__":
    main()
