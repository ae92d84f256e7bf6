"""`nrl-lite rerun FILE [key=value ...]`: repeat the steps of a capsule, and name the first thing that differs.

FILE is what `nrl-lite capsule` wrote. Overrides change the configuration, for example to find the key that causes a
difference. Run it in the folder of the first command if paths are relative.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.overrides import check_overrides
from nemo_rl_lite.errors import ConfigError, shown_as_message
from nemo_rl_lite.system.machine import check_ray_address, check_single_launcher, local_path

DIFFERS = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 equal, 1 different or the run failed, 2 bad capsule, overrides or arguments."""
    parser = argparse.ArgumentParser(
        prog="nrl-lite rerun", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=local_path, help="a capsule")
    parser.add_argument("overrides", nargs="*", help="changes of the configuration, as for train")
    parser.add_argument("--folder", type=local_path, help="folder of the new run (default: outputs/NAME/rerun-TIME)")
    given = parser.parse_intermixed_args(arguments)
    with shown_as_message("nrl-lite rerun"):
        from nemo_rl_lite.run.capsule import read

        is_equal = rerun(read(given.file), given.overrides, given.folder)
    sys.exit(0 if is_equal else DIFFERS)


def rerun(capsule: Mapping[str, Any], arguments: Sequence[str], target: Path | None) -> bool:
    """Repeat a capsule's steps in a new folder, and print the comparison. Return whether all is equal.

    Raises:
        ConfigError: invalid overrides, or the capsule is of a later version.
        LauncherError: the new run failed.
    """
    from nemo_rl_lite.config.composition import overlaid
    from nemo_rl_lite.observability.callbacks import Callbacks
    from nemo_rl_lite.run.capsule import compare, make, surroundings, to_repeat
    from nemo_rl_lite.run.command import logged_to, run_in
    from nemo_rl_lite.run.folder import check_place
    from nemo_rl_lite.validation.compose import resolve, restore

    overrides, violations = check_overrides(arguments)
    if violations:
        raise ConfigError(violations)
    config = restore(json.dumps(capsule["config"]))
    if overrides:
        config = resolve(overlaid(config, overrides))
    folder = target or Path("outputs") / config.run_name / f"rerun-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    check_place(folder, "--folder")
    check_single_launcher()
    check_ray_address()
    folder.mkdir(parents=True, exist_ok=True)
    last = capsule["steps"][-1]["step"]
    stopping = Callbacks(on_step=lambda metrics: metrics["step"] >= last)
    with logged_to(folder):
        run_in(folder, to_repeat(config, capsule), shlex.join(["nrl-lite", "rerun", *arguments]), stopping)
    whole = max(sum("whole" in one for one in step.get("train", ())) for step in capsule["steps"])
    now = make(folder, len(capsule["steps"]) - 1, whole)
    sys.stdout.write("".join(f"changed  {line}\n" for line in surroundings(capsule, now)))
    differences = compare(capsule, now)
    if not differences:
        sys.stdout.write(f"equal    all compared values up to step {last}\n")
        return True
    first, *others = differences
    sys.stdout.write(f"first difference  {first}\n")
    sys.stdout.write("".join(f"then              {one}\n" for one in others if one.step == first.step))
    if later := sorted({one.step for one in others} - {first.step}):
        sys.stdout.write(f"also different    steps {', '.join(map(str, later))}\n")
    return False


if __name__ == "__main__":
    main()
