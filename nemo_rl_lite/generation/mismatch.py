"""The mismatch budget of a run: engines above `generation.max_gen_kl` restart with plain settings.

`nrl-lite choose` measures settings before a run (`run/choosing.py`). A run only checks those that it has.
"""

import json
from collections.abc import Callable
from pathlib import Path

from nemo_rl_lite.config.engines import plain_engines, rounding_options
from nemo_rl_lite.config.schema import GenerationConfig

# File of a run's folder that keeps the plain settings after a resume.
PLAIN_ENGINES = "plain_engines.json"
# Steps in a row above the budget until the engines restart.
STEPS = 3


class MismatchBudget:
    """Decides on the settings of a run's engines. `settings` are those that they should have."""

    def __init__(self, given: GenerationConfig, folder: Path, say: Callable[[str], None]):
        self.settings, self._folder, self._say = within_budget(given, folder), folder, say
        self._above = 0

    def note(self, step: int, nats: float) -> None:
        """Note the `gen_kl_error` of a step whose samples are of the policy's current weights, in nats per token.
        After the third one in a row above the budget, change to plain settings."""
        limit = self.settings.max_gen_kl
        self._above = 0 if limit is None or nats <= limit else self._above + 1
        if self._above != STEPS:
            return
        why = f"step {step}: train/gen_kl_error is {nats:.3g} nats, and in {STEPS} steps in a row above {limit:g}"
        options = rounding_options(self.settings)
        if not options:
            fix = "raise generation.max_gen_kl, or set algorithm.loss_fn.use_importance_sampling_correction=true"
            self._say(f"{why} (generation.max_gen_kl); the engines have no faster setting to give up: {fix}")
            return
        found = {"step": step, "gen_kl_error": nats, "vllm_kwargs": options}
        (self._folder / PLAIN_ENGINES).write_text(json.dumps(found))
        self.settings, self._above = plain_engines(self.settings), 0
        removed = ", ".join(f"{name}={value}" for name, value in options.items())
        self._say(f"{why} (generation.max_gen_kl); the engines restart without {removed}")


def within_budget(given: GenerationConfig, folder: Path) -> GenerationConfig:
    """Return plain settings if the run in `folder` has found the given ones to be above the budget, else the given
    ones."""
    file = folder / PLAIN_ENGINES
    if given.max_gen_kl is None or not file.exists():
        return given
    found = json.loads(file.read_text())
    is_above = not found["gen_kl_error"] <= given.max_gen_kl
    return plain_engines(given) if is_above and found["vllm_kwargs"] == rounding_options(given) else given
