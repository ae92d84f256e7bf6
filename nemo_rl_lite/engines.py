"""`nrl-lite engines RUN N`: end or start engines of a running run, so that N run.

RUN is a folder, the name of a run below outputs/ (the newest of that name), or `last`. The run needs
generation.min_engines. Responses of engines that end continue on the others. An engine that starts joins the rollout in
progress, with the policy's weights.
"""

import argparse
import sys
from collections.abc import Sequence

from nemo_rl_lite.errors import ConfigError, LauncherError, Violation, shown_as_message


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 requested, 1 the run has ended, 2 no such run or no such number."""
    parser = argparse.ArgumentParser(
        prog="nrl-lite engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a folder, a name, or last")
    parser.add_argument("count", metavar="N", type=int, help="number of engines")
    given = parser.parse_args(arguments)
    with shown_as_message("nrl-lite engines"):
        from nemo_rl_lite.config.sizes import engines, least_engines
        from nemo_rl_lite.observability.environment import CONFIG_FILE
        from nemo_rl_lite.observability.runs import find_run, read_state
        from nemo_rl_lite.run.following import ending, shown_path
        from nemo_rl_lite.system.engine_count import request_engines
        from nemo_rl_lite.validation.compose import restore

        folder = find_run(given.run)
        if not (state := read_state(folder)).is_running:
            raise LauncherError(f"{shown_path(folder)} is not running, {ending(state)}")
        config = restore((folder / CONFIG_FILE).read_text())
        least, most = least_engines(config), engines(config)
        if least == most:
            rule, fix = f"keeps all {most} engines running", "start the run with a smaller generation.min_engines"
            if config.generation.colocated.enabled:
                rule, fix = "shares the engines' devices with the policy", "generation.colocated.enabled=false"
            raise ConfigError([Violation("RUN", given.run, rule, fix)])
        if not least <= given.count <= most:
            rule = f"must be from {least} (generation.min_engines) to {most}, the number of engines at the start"
            raise ConfigError([Violation("N", given.count, rule, f"nrl-lite engines {given.run} {most}")])
        request_engines(folder, given.count)
        sys.stdout.write(f"requested: {given.count} of {most} engines\n")


if __name__ == "__main__":
    main()
