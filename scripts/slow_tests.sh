#!/usr/bin/env bash
# Sets up this machine and runs the tests that scripts/test.sh leaves out: the main job with all its steps and three
# seeds, `nrl-lite chat`, four policy ranks under Ray, pipeline ranks that overlap their exchanges, runs and evaluations
# whose processes die, Ctrl-C, a tensor-parallel engine on CPUs, adapters in shards, a study of FP8 rounding, the
# composition of all recipes and of all overrides of the tests, and jobs of a real Slurm (skipped where it is not
# installed).
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh cpu
exec .venv/bin/pytest -m "slow or slurm" "$@"
