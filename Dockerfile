# syntax=docker/dockerfile:1
# An image with everything that a run needs, in the versions that constraints.txt pins:
#
#   docker build -t nemo-rl-lite .                               GPUs (CUDA 13.0; the driver must be 580 or newer)
#   docker build -t nemo-rl-lite:cpu --build-arg KIND=cpu .      CPUs only
#
#   docker run --rm --gpus all --shm-size=32g -v hf:/cache/huggingface -v "$PWD:/workspace" nemo-rl-lite \
#       train recipes=...
#
# Ray's object store and NCCL's buffers are in shared memory. Docker gives a container 64 MB of it, hence --shm-size (or
# --ipc=host). docs/clusters.md has the details.
ARG KIND=gpu

# No CUDA toolkit: what Transformer Engine's torch part is compiled with comes from the package index.
FROM ubuntu:noble-20251001 AS build
ARG KIND
ENV PIP_NO_CACHE_DIR=1
# Ubuntu's packages change within a release; constraints.txt pins the packages that a run computes with.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential python3.12 python3.12-dev python3.12-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nemo_rl_lite
# The files that decide what is installed come first, so that a change of the code alone reinstalls nothing.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts/install.sh scripts/transformer_engine.sh scripts/
COPY nemo_rl_lite/__init__.py nemo_rl_lite/
# The package is built with its configs; an empty folder is enough here. The cache keeps what is compiled, which takes ten
# minutes, for the next build on this machine.
RUN --mount=type=cache,target=/root/.cache/nemo_rl_lite mkdir configs && bash scripts/install.sh "${KIND}"

# The runtime needs no CUDA toolkit either: torch's wheels bring CUDA's libraries, and Triton its assembler.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS runtime-base-gpu
FROM ubuntu:noble-20251001 AS runtime-base-cpu

# hadolint ignore=DL3006
FROM runtime-base-${KIND} AS runtime
# Triton and torch.compile compile C and C++ against Python's headers while they run.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ gcc libc6-dev libgomp1 libnuma1 python3.12 \
      python3.12-dev \
 && rm -rf /var/lib/apt/lists/* \
 && userdel --remove ubuntu \
 && useradd --create-home --uid 1000 trainer \
 && mkdir -p /cache/huggingface /workspace \
 && chown trainer:trainer /cache/huggingface /workspace
# The path stays the same, because a virtual environment cannot be moved.
COPY --from=build /opt/nemo_rl_lite/.venv /opt/nemo_rl_lite/.venv
WORKDIR /opt/nemo_rl_lite
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY nemo_rl_lite nemo_rl_lite
COPY configs configs
COPY recipes recipes
COPY scripts scripts
# Transformer Engine compiles kernels with NVRTC, and does not find the headers of CUDA 13's wheels itself.
ENV PATH=/opt/nemo_rl_lite/.venv/bin:$PATH \
    HF_HOME=/cache/huggingface \
    NVTE_CUDA_INCLUDE_DIR=/opt/nemo_rl_lite/.venv/lib/python3.12/site-packages/nvidia/cu13/include \
    PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /workspace
VOLUME /cache/huggingface
ENTRYPOINT ["nrl-lite"]
CMD ["--help"]
