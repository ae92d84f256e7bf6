"""A policy of two ranks that loses one while the other waits for it in a collective, and takes the step again."""

import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.heartbeat import PERIOD_S, last_heartbeats
from nemo_rl_lite.cluster.runtime import place
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers import reserve
from nemo_rl_lite.workers.policy import RemotePolicy
from tests.functional.embedded import OF_THE_EMBEDDED

ROWS, LENGTH = 8, 12
MASK = [False] * 4 + [True] * (LENGTH - 4)
LIMIT_S = 200.0
SETTINGS = [
    *("algorithm=sft", f"policy.train_global_batch_size={ROWS}", "policy.train_micro_batch_size=4"),
    "cluster.threads_per_worker=1",
]


@dataclass(frozen=True)
class Recovery:
    """Effects of a rank's loss, and the weights after the step, with and without it."""

    kept: list[int]
    before: list[int]
    after: list[int]
    """Processes of the ranks."""
    noticed_s: float
    closed_s: float
    step_s: float
    """Seconds from the loss."""
    weights: dict[str, Tensor]
    undisturbed: dict[str, Tensor]


def lose_a_rank(folder: Path, model: Path, victim: int, overrides: Sequence[str]) -> Recovery:
    """Take a step, save, take a second step; take it again with the loss of rank `victim`, and from the save."""
    config = compose_config([f"policy.model_name={model}", *OF_THE_EMBEDDED, *SETTINGS, *overrides])
    group = reserve.policy_group(config, place(config, 0).policy, folder)
    policy = build(config, group, model, resumes=False)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    step(policy, 0)
    policy.begin_save(str(checkpoint))
    policy.finish_save()
    step(policy, 1)
    undisturbed = exported(policy, folder / "undisturbed")
    before = processes(group, folder)
    for_each(group, group.ranks, lambda process: setattr(process, "model", weakref.ref(process._worker._model)))
    # A rank that stands still keeps the other waiting, before it is lost.
    other = psutil.Process(before[1 - victim])
    os.kill(before[victim], signal.SIGSTOP)
    calls = group.call("train", SFTLoss(), SFTLoss().counts(rows_of(2)), slice(0, ROWS), phase="train")
    wait_for_phase(f"policy rank {1 - victim}", "train")
    time.sleep(2 * PERIOD_S)
    assert other.is_running()
    os.kill(before[victim], signal.SIGKILL)
    lost_at = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        wait(calls)
    assert caught.value.lost and caught.value.worker == f"policy rank {victim}"
    noticed_s = time.monotonic() - lost_at
    kept = reserve._closed(group, group.close(), reserve.CLOSE_GPU_S)
    closed_s = time.monotonic() - lost_at
    assert for_each(group, kept, lambda process: process.model() is None) == [True] * len(kept)
    group.replace([rank for rank in group.ranks if rank not in kept])
    policy = build(config, group, model, resumes=True)
    policy.load(str(checkpoint))
    step(policy, 1)
    step_s = time.monotonic() - lost_at
    weights = exported(policy, folder / "recovered")
    return Recovery(kept, before, processes(group, folder), noticed_s, closed_s, step_s, weights, undisturbed)


def wait_for_phase(worker: str, phase: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while last_heartbeats([worker])[0].phase != phase:
        assert time.monotonic() < deadline, last_heartbeats([worker])
        time.sleep(0.2)


def for_each(group: WorkerGroup, ranks: Sequence[int], function: Callable[[Any], Any]) -> list[Any]:
    """The results of a lambda function of the process of each of these ranks, which could not import another one."""
    return ray.get([group.hosts[rank].__ray_call__.remote(function) for rank in ranks])


def build(config: Config, group: WorkerGroup, model: Path, resumes: bool) -> RemotePolicy:
    wait(reserve._load_policy(config, group, reserve.POLICY_CLASS), timeout_s=LIMIT_S)
    wait(reserve.start_policy(config, group, model, resumes), timeout_s=LIMIT_S)
    policy = RemotePolicy(group, global_batch=ROWS)
    policy.prepare_for_training()
    return policy


def rows_of(number: int) -> list[TokenRow]:
    tokens = torch.randint(4, 14, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
    return [TokenRow(row, MASK) for row in tokens.tolist()]


def step(policy: RemotePolicy, number: int) -> None:
    policy.train(policy.put_batch(rows_of(number)), SFTLoss())


def exported(policy: RemotePolicy, folder: Path) -> dict[str, Tensor]:
    policy.export_hf(str(folder))
    return load_file(folder / "model.safetensors")


def processes(group: WorkerGroup, folder: Path) -> list[int]:
    """The last process of each rank."""
    logs = [(folder / "logs" / f"policy-{rank}.log").read_text() for rank in group.ranks]
    return [int(re.findall(r"^process (\d+) on ", log, re.MULTILINE)[-1]) for log in logs]


def describe(found: Recovery) -> str:
    differing = sum(not torch.equal(found.weights[name], one) for name, one in found.undisturbed.items())
    return (
        f"noticed after {found.noticed_s:.1f} s, closed after "
        f"{found.closed_s:.1f} s, next step's end after {found.step_s:.1f} s; {differing} of "
        f"{len(found.undisturbed)} tensors differ from the undisturbed run's"
    )
