#!/usr/bin/env bash
# Sets up this machine and runs the main job: a tiny model is warmed up by SFT, then learns by GRPO, on CPUs alone.
# Arguments are overrides, for instance: bash scripts/quickstart.sh algorithm.seed=1
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# A whole environment for GPUs stays. Its vLLM does not run on CPUs.
kind=cpu
[[ ! -f "$root/.venv/installed" ]] || read -r kind _ <"$root/.venv/installed"
[[ $kind == cpu || " $*" == *" generation="* ]] || set -- generation=transformers "$@"
bash "$root/scripts/install.sh" "$kind"
# Not exec: the seconds of a start are those of this process.
"$root/.venv/bin/python" -m nemo_rl_lite.quickstart "$@"
