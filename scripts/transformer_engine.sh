#!/usr/bin/env bash
# Installs the part of Transformer Engine that has no wheel, compiled against an installed torch:
#
#   bash scripts/transformer_engine.sh PYTHON
#
# PYTHON is an interpreter that has torch and Transformer Engine. The wheel is kept in ~/.cache/nemo_rl_lite (under
# XDG_CACHE_HOME if that is set), by the versions of both, and used again. Neither a GPU nor a CUDA toolkit is needed: the
# headers of torch's CUDA come from the package index, and so does nvcc, which is asked for its version and compiles nothing.
# MAX_JOBS sets how many compilers run at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1
pip() { "$python" -m pip "$1" --no-input --disable-pip-version-check --no-deps -c constraints.txt "${@:2}"; }
version() { grep -oP "^$1==\K.*" constraints.txt; }

name=transformer_engine_torch-$(version transformer-engine-torch)
kept=${XDG_CACHE_HOME:-$HOME/.cache}/nemo_rl_lite/torch-$(version torch)-$(uname -m)
if ! compgen -G "$kept/$name-*.whl" >/dev/null; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  pip install --target "$scratch/tools" \
    nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl setuptools wheel packaging ninja
  torch=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1] / "nvidia")')
  export CUDA_HOME=$scratch/tools/nvidia/cu13
  export CPATH=$CUDA_HOME/include:$CUDA_HOME/include/cccl:$torch/cu13/include:$torch/cudnn/include:$torch/nccl/include
  export PYTHONPATH=$scratch/tools PATH=$scratch/tools/bin:$PATH NVTE_FRAMEWORK=pytorch

  # A compiler takes up to 1.5 GiB.
  jobs=$(awk -v cores="$(nproc)" '/MemAvailable/ {n = int($2 / 2 ^ 21); print (n < 1) ? 1 : (n < cores ? n : cores)}' \
    /proc/meminfo)
  export MAX_JOBS=${MAX_JOBS:-$jobs}
  pip wheel --verbose --no-build-isolation --wheel-dir "$scratch" transformer-engine-torch
  mkdir -p "$kept"
  mv "$scratch/$name"-*.whl "$kept/"
  unset CUDA_HOME CPATH PYTHONPATH
fi
pip install "$kept/$name"-*.whl
