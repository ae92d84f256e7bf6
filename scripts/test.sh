#!/usr/bin/env bash
# Sets up this machine, checks style and types, and runs the tests. Arguments go to pytest: bash scripts/test.sh tests/unit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh cpu
# Tests start many processes, which would compile what they import again and again.
unset PYTHONDONTWRITEBYTECODE
export PATH="$PWD/.venv/bin:$PATH"
# Style and types are checked while the tests run; what the checks say follows the tests' own report.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
(
  failed=0
  for check in "ruff check ." "ruff format --check ." "pyrefly check"; do
    echo "== $check"
    $check || failed=1
  done
  exit "$failed"
) >"$log" 2>&1 &
checks=$!
# Three groups at a time on two cores: many tests wait for processes to start, meet or end.
(($#)) || set -- -n 3 --dist loadscope
status=0
pytest "$@" || status=$?
wait "$checks" || status=$((status ? status : 1))
cat "$log"
exit "$status"
