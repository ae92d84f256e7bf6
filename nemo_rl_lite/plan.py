"""`nrl-lite plan [options] [group=file ...] [key.path=value ...]`: predict memory, step time and whether a run fits.

Needs neither a GPU nor weights.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_lite.config.composition import notes_on_names
from nemo_rl_lite.config.experiments import as_words, expanded
from nemo_rl_lite.config.overrides import given_keys
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.errors import ConfigError, LauncherError, Violation
from nemo_rl_lite.models.shape import MADE_HERE, find_shape
from nemo_rl_lite.planning.budget import KNOWN, parse_size, size_of
from nemo_rl_lite.system.machine import local_path
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.validation.layout import shape_fits_the_layout
from nemo_rl_lite.validation.notes import notes, notes_elsewhere, show_notes

DOES_NOT_FIT = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 fits, 1 does not fit or failed, 2 bad configuration or arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", help="as for train")
    gpus = f"a GPU ({', '.join(KNOWN)}) or its memory (80GiB); default: this machine's, or H100"
    parser.add_argument("--gpu", help=gpus)
    parser.add_argument("--host-memory", help="host memory of a machine, such as 2TiB; default: not checked")
    parser.add_argument(
        "--model-config", type=local_path, help="the model's config.json, if the model is not on this machine"
    )
    parser.add_argument(
        "--mean-length", type=float, metavar="TOKENS", help="mean tokens per response; default: half of the maximum"
    )
    given = parser.parse_intermixed_args(as_words(sys.argv[1:] if arguments is None else arguments))
    try:
        gpu = size_of(given.gpu)
        host = parse_size(given.host_memory) if given.host_memory else None
    except ValueError as error:
        parser.error(str(error))
    try:
        given.overrides = expanded(given.overrides)
        if given.model_config and "policy.model_name" in given_keys(given.overrides):
            rule = "conflicts with policy.model_name, which the command also sets"
            raise ConfigError([Violation("--model-config", str(given.model_config), rule, "give one of the two")])
        # With --model-config, the model's folder need not exist.
        name = f"policy.model_name=config/{given.model_config.parent.name or 'here'}" if given.model_config else ""
        config, overrides = _compose([*given.overrides, *filter(None, [name])])
        show_notes(
            [*notes_on_names(given.overrides), *notes(config, given_keys(given.overrides)), *notes_elsewhere(config)]
        )
        from nemo_rl_lite.observability.console import RunConsole
        from nemo_rl_lite.planning import page

        shape = find_shape(config.policy.model_name, given.model_config)
        violations = list(shape_fits_the_layout(config, shape))
        if given.gpu and not on_gpus(config):
            fix = "cluster.gpus_per_node=1, or no --gpu"
            violations.append(Violation("--gpu", given.gpu, "the run uses CPUs", fix))
        length, most = given.mean_length, config.generation.max_new_tokens
        if length is not None and not 0 < length <= most:
            rule = f"must be a response length of 1 to {most} tokens (generation.max_new_tokens)"
            violations.append(Violation("--mean-length", f"{length:g}", rule, f"--mean-length {most // 2 or 1}"))
        if violations:
            raise ConfigError(violations)
        plan = page.make_plan(config, overrides, shape, gpu, host)
        page.show_plan(plan, RunConsole(), length)
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_status)
    sys.exit(0 if plan.fits else DOES_NOT_FIT)


def _compose(overrides: list[str]) -> tuple[Config, list[str]]:
    """Return the configuration and its overrides. A published model of the same sizes replaces a recipe's model that
    does not exist yet."""
    try:
        return compose_config(overrides), overrides
    except ConfigError as error:
        names = [str(one.value) for one in error.violations if one.key == "policy.model_name"]
        published = [MADE_HERE[name] for name in names if name in MADE_HERE and not Path(name).exists()]
        if not published:
            raise
    overrides = [*overrides, f"policy.model_name={published[0]}"]
    return compose_config(overrides), overrides


if __name__ == "__main__":
    main()
