"""What the scripts of policy ranks share: policies of one rank without Ray, in one case after another."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.policy.worker import MegatronWorker
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import policy_arguments
from tests.functional.embedded import OF_THE_EMBEDDED


def policies(model_folder: str, cases: str, **changed: Any) -> Iterator[tuple[str, Config, MegatronWorker]]:
    """Build a policy for each case of a JSON object of overrides by name, and close it before the next one."""
    for name, overrides in json.loads(cases).items():
        config = compose_config([f"policy.model_name={model_folder}", *OF_THE_EMBEDDED, *overrides])
        arguments = policy_arguments(config, Path(config.policy.model_name)) | {"threads": 1} | changed
        worker = MegatronWorker(**arguments)
        yield name, config, worker
        leave(worker)


def leave(worker: Any) -> None:
    """Close a worker, so that another one can begin in this process."""
    worker.close()
    # A rank that is early must not meet the store that the last layout leaves.
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def is_first() -> bool:
    return os.environ["RANK"] == "0"


def gathered(own: Any) -> list[Any]:
    """What every rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def keep(found: Any, folder: str | Path, name: str) -> None:
    """Write what was found in a case to its file, on the first rank."""
    if is_first():
        torch.save(found, path_of(folder, name))


def path_of(folder: str | Path, name: str) -> Path:
    return Path(folder) / name.replace(" ", "-")
