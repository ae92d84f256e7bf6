"""The embedded model in a folder of its own, as a user's model would be."""

from pathlib import Path

OF_THE_EMBEDDED = (
    "policy.max_total_sequence_length=32",
    "generation.max_new_tokens=8",
    "policy.megatron_cfg.optimizer.lr=3e-4",
)
"""The defaults that follow from the embedded model's name, and that its folder so does not have."""


def of_run(folder: Path, model: Path) -> list[str]:
    """The overrides of a run in a folder, each of whose processes computes with one thread."""
    own = [f"hydra.run.dir={folder}", f"policy.model_name={model}"]
    return [*own, *OF_THE_EMBEDDED, "cluster.threads_per_worker=1"]
