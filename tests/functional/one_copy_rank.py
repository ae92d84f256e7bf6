"""One policy rank with LoRA, without Ray, whose frozen weights are its own or those of an engine that shares them.

one_copy_rank.py MODEL_FOLDER OUTPUT_FOLDER. Writes a file for each of the two: logprobs, steps, adapters and weights.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.policy.worker import MegatronWorker
from nemo_rl_lite.refit.ipc import SharedFrozenParams, share_weights
from tests.functional.rank import keep, policies
from tests.unit.refit.files import Files

OVERRIDES = [
    *("policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.peft.dim=4", "policy.megatron_cfg.peft.alpha=8"),
    *("policy.megatron_cfg.optimizer.lr=1e-2", "policy.train_global_batch_size=8", "offload=colocated"),
]


def main(model_folder: str, output_folder: str) -> None:
    cases = json.dumps(dict.fromkeys(("own", "shared"), OVERRIDES))
    for name, config, worker in policies(model_folder, cases, keep_reference=True):
        keep(run(config, worker, Path(output_folder), name), output_folder, name)


def run(config: Config, worker: MegatronWorker, folder: Path, name: str) -> dict[str, Any]:
    worker.plan_refit(config.refit, shared_device=True, consumers=1, adapters_alone=True)
    frozen = None
    if name == "shared":
        files = Files(folder / "memory")
        files.folder.mkdir()
        worker._model.in_engine = SharedFrozenParams(files)
        weights = of_an_engine(load_file(Path(config.policy.model_name) / "model.safetensors"))
        frozen = worker.use_shared_weights(
            share_weights([files.new(str(index), one) for index, one in enumerate(weights)], files)
        )
    source = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 60, (8, 12), generator=source)
    advantages = torch.randn(8, generator=source)
    batch = [
        TokenRow(row.tolist(), [place >= 5 for place in range(12)], [-4.0] * 12, advantage.item())
        for row, advantage in zip(tokens, advantages, strict=True)
    ]
    loss = GRPOLoss(config.options(GRPOConfig).loss_fn)
    counts, steps = loss.counts(batch), []
    for _ in range(2):
        # The weights that the rank has itself leave its device and come back.
        worker.prepare_for_generation()
        worker.prepare_for_logprob()
        worker.put_batch(batch)
        worker.score(("previous", "reference"), counts)
        worker.prepare_for_training()
        steps.append(worker.train(loss, counts))
    moved = sum(move.nbytes for what, move in worker.pop_moves() if what == "parameters/to_host")
    scored = worker.logprobs(tokens, torch.full((8,), 12))
    worker.begin_save(str(checkpoint(folder / f"{name}-checkpoint")))
    worker.finish_save()
    worker.export_hf(str(folder / f"{name}-hf"))
    own = sum(parameter.numel() * 4 for parameter in worker._model.own_parameters())
    return {"scored": scored, "steps": steps, "shared": frozen, "moved": moved, "own": own}


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    return folder


def of_an_engine(weights: dict[str, Tensor]) -> Iterator[Tensor]:
    """The weights as vLLM has them: fused projections, and a padded vocabulary."""
    for name, weight in weights.items():
        if "q_proj" in name or "gate_proj" in name:
            parts = ("q_proj", "k_proj", "v_proj") if "q_proj" in name else ("gate_proj", "up_proj")
            yield torch.cat([weights[name.replace(parts[0], part)] for part in parts])
        elif "embed" in name or "lm_head" in name:
            yield torch.cat([weight, torch.zeros(64, weight.shape[1])])
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            yield weight


if __name__ == "__main__":
    main(*sys.argv[1:])
