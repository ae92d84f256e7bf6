#!/usr/bin/env bash
# Sets up this machine and runs the tests that scripts/test.sh leaves out: the main job with all its steps and three
# seeds, four policy ranks under Ray, a run whose worker or whose Ray dies, Ctrl-C, a tensor-parallel engine on CPUs, what
# Hydra composes of all recipes and of all overrides of the tests, and jobs of a real Slurm (skipped where that is not installed).
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh cpu
exec .venv/bin/pytest -m "slow or slurm" "$@"
