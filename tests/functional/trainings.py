"""Trains in this process `COUNT` times, as a notebook does, with a real Ray: `trainings.py COUNT FOLDER MODEL`.

Prints, as JSON lines, what the process has before the first training and after each.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from nemo_rl_lite import DPO, GRPO, SFT
from nemo_rl_lite.errors import CallbackError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
PROBLEMS = [{"prompt": f"{n}", "answer": f"{n}"[::-1]} for n in range(1000, 1048)]
PAIRS = [{"prompt": one["prompt"], "chosen": one["answer"], "rejected": one["prompt"]} for one in PROBLEMS]
SMALL = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "train_global_batch_size": 16,
    "max_total_sequence_length": 32,
    "max_new_tokens": 8,
    "threads_per_worker": 1,
    "max_num_steps": 2,
    "save_period": 0,
    "plots": False,
}
OFFLINE = {name: value for name, value in SMALL.items() if not name.startswith("num_") and name != "max_new_tokens"}


def state() -> dict[str, object]:
    """What a training may not leave behind; children, as Ray's, may take a moment to end."""
    me, deadline = psutil.Process(), time.monotonic() + 10
    while me.children(recursive=True) and time.monotonic() < deadline:
        time.sleep(0.2)
    gc.collect()
    return {
        "children": [" ".join(child.cmdline()[:3]) for child in me.children(recursive=True)],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": me.num_threads(),
        "files": me.num_fds(),
        "ports": sorted(one.laddr.port for one in me.net_connections() if one.status == psutil.CONN_LISTEN),
        "handlers": [id(signal.getsignal(one)) for one in SIGNALS],
        "logging": [repr(logging.getLogger().handlers), logging.getLogger().level],
        # Values may be secrets.
        "environment": {name: hash(value) for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")},
        "MiB": me.memory_info().rss // 2**20,
    }


async def trainings(count: int, folder: Path, model: str) -> None:
    """Train in a running event loop, by GRPO, SFT and DPO in turn; the callback of every fourth raises."""

    def score(response: str, answer: str) -> float:
        return len(set(response) & set(answer)) / len(PROBLEMS[0]["answer"])

    sys.stderr.write(f"{json.dumps(state())}\n")
    for number in range(count):
        shared = {"output_dir": folder / str(number), "on_step": fail if number % 4 == 3 else None}
        # Nothing starts before `train`.
        run = [
            GRPO(model, reward=score, data=PROBLEMS[:40], eval_data=PROBLEMS[40:], **shared, **SMALL),
            SFT(model, data=PROBLEMS[:40], eval_data=PROBLEMS[40:], **shared, **OFFLINE),
            DPO(model, data=PAIRS[:40], eval_data=PAIRS[40:], **shared, **OFFLINE),
        ][number % 3]
        try:
            result = run.train()
            assert result.summary.steps == 2 and result.model_path.is_dir()
        except CallbackError:
            assert shared["on_step"] is fail
        sys.stderr.write(f"{json.dumps(state())}\n")


def fail(metrics: dict[str, float]) -> None:
    raise ValueError("as a user's mistake")


if __name__ == "__main__":
    asyncio.run(trainings(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
