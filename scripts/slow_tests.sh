#!/usr/bin/env bash
# Sets up this machine and runs the tests that scripts/test.sh leaves out: the main job with three seeds, four policy ranks
# under Ray, what Hydra itself composes of the tests' overrides, and jobs of a real
# Slurm (skipped where that is not installed). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh cpu
exec .venv/bin/pytest -m "slow or slurm" "$@"
