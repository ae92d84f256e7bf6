#!/usr/bin/env bash
# Sets up this machine and runs the tests that need a GPU, as many as it has GPUs for. Arguments go to pytest; tests
# among them are run instead of all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
nvidia-smi -L || { echo "gpu_tests: no NVIDIA GPU here" >&2; exit 1; }
# NRL_PYTHON names an environment that is set up already.
if [[ -z ${NRL_PYTHON:-} ]]; then
  bash scripts/install.sh gpu
  NRL_PYTHON=.venv/bin/python
fi
tests=(tests/gpu)
for argument in "$@"; do
  [[ -e ${argument%%::*} ]] && tests=()
done
exec "$NRL_PYTHON" -m pytest -m gpu --timeout=580 "${tests[@]}" "$@"
