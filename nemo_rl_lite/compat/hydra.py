"""Hydra."""

# Shows an error in a run's task as `hydra.main` does: without Hydra's own frames.
from hydra._internal.utils import run_and_report  # noqa: F401

from nemo_rl_lite.compat.versions import written_for

written_for("hydra-core", "1.3", __name__)
