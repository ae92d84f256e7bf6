#!/usr/bin/env bash
# Sets up this machine, checks style and types, and runs the tests. Arguments go to pytest: bash scripts/test.sh tests/unit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh cpu
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
pyrefly check
if (($#)); then exec pytest "$@"; fi
# Two files at a time: starting processes is what most tests wait for.
exec pytest -n 2 --dist loadfile
