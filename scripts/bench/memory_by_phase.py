"""Predict the memory of each phase with three offload presets, as `nrl-lite plan` does: memory_by_phase.py

The task of choosing.py with one model on one GPU of 80 GB. figures.py draws the record.
"""

import sys

import record
from choosing import GPU_BYTES, TASK

from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.planning.automatic import resolve_auto
from nemo_rl_lite.planning.budget import budget
from nemo_rl_lite.validation.compose import compose_config

MODEL = "Qwen/Qwen3-1.7B"
PRESETS = ("none", "pinned", "auto")


def main(arguments: list[str]) -> None:
    if arguments:
        sys.exit(__doc__)
    write(PRESETS)


def write(presets: tuple[str, ...]) -> None:
    results, shape = [], find_shape(MODEL)
    for preset in presets:
        config = compose_config([*TASK, f"policy.model_name={MODEL}", f"offload={preset}"])
        planned = budget(resolve_auto(config, shape, GPU_BYTES).config, shape, GPU_BYTES)
        for (phase, component), nbytes in planned.prediction.items():
            results.append(record.result(f"{phase}, {component}", preset, "GiB", [nbytes.device / 2**30]))
        for phase, nbytes in planned.buffers.items():
            results.append(record.result(f"{phase}, other", preset, "GiB", [(nbytes + planned.overhead) / 2**30]))
    record.write("memory-by-phase-predicted", results, [], note=f"model: {MODEL}, one GPU", machine=False)


def trial() -> None:
    write(("pinned",))


if __name__ == "__main__":
    record.start(main, trial)
