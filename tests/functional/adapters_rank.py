"""One policy rank with LoRA, without Ray: whether its exported adapters are those that are merged into its weights.

adapters_rank.py MODEL_FOLDER OUTPUT_FOLDER LAYOUTS, a JSON object of overrides by layout. For each, rank 0 writes a
file: the adapters, the merged weights, and whether each rank found the adapters to be moved elements.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.policy.export import Adapters, export_weights, find_export
from nemo_rl_lite.policy.model import is_adapter
from nemo_rl_lite.policy.worker import MegatronWorker
from tests.functional.rank import gathered, keep, policies


def main(model_folder: str, output_folder: str, layouts: str) -> None:
    for name, config, worker in policies(model_folder, layouts):
        keep(run(config, worker), output_folder, name)
        dist.barrier()


def run(config: Config, worker: MegatronWorker) -> dict[str, Any]:
    model = worker._model
    source = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            # B begins at zero.
            if is_adapter(name):
                parameter.data.normal_(0, 0.1, generator=source)
    worker.plan_refit(config.refit, shared_device=True, consumers=1, adapters_alone=True)
    found = find_export(model, worker._producer.plan, Adapters(model))
    exported, unlike = Adapters(model), gathered(found.unlike)
    return {
        "adapters": dict(exported.export(exported.tasks())),
        "merged": dict(export_weights(model)),
        "unlike": unlike,
        "names": [slot.name for bucket in worker._producer.plan.buckets for slot in bucket.slots],
        "assembles": type(worker._producer.export).__name__,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
