"""One policy rank with LoRA, without Ray: whether its exported adapters are those that are merged into its weights.

adapters_rank.py MODEL_FOLDER OUTPUT_FOLDER LAYOUTS, a JSON object of overrides by layout. For each, rank 0 writes a
file: the adapters, the merged weights, and whether each rank found the adapters to be moved elements.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl_lite.policy.megatron.export_recipe import export_weights, find_export
from nemo_rl_lite.policy.megatron.exports import Adapters
from nemo_rl_lite.policy.megatron.lora import is_adapter
from nemo_rl_lite.policy.megatron.worker import MegatronWorker
from nemo_rl_lite.rules.compose import compose_config
from nemo_rl_lite.run.workers.reserve import policy_arguments
from tests.functional.embedded import OF_THE_EMBEDDED
from tests.functional.policy_rank import forget_layout


def main(model_folder: str, output_folder: str, layouts: str) -> None:
    for name, overrides in json.loads(layouts).items():
        run(model_folder, Path(output_folder) / name, overrides)
        forget_layout()


def run(model_folder: str, output: Path, overrides: list[str]) -> None:
    config = compose_config([f"policy.model_name={model_folder}", *OF_THE_EMBEDDED, *overrides])
    worker = MegatronWorker(**policy_arguments(config, Path(model_folder)) | {"threads": 1})
    model = worker._model
    source = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            # B begins at zero.
            if is_adapter(name):
                parameter.data.normal_(0, 0.1, generator=source)
    worker.plan_refit(config.refit, shared_device=True, consumers=1, adapters_alone=True)
    found = find_export(model, worker._producer.plan, Adapters(model))
    all_unlike = [None] * dist.get_world_size()
    dist.all_gather_object(all_unlike, found.unlike)
    exported = Adapters(model)
    adapters, merged = dict(exported.export(exported.tasks())), dict(export_weights(model))
    if os.environ["RANK"] == "0":
        names = worker._producer.plan.names
        kept = {"adapters": adapters, "merged": merged, "unlike": all_unlike, "names": names}
        torch.save(kept | {"assembles": type(worker._producer.export).__name__}, output)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
