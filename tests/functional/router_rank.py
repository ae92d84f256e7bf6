"""A policy whose routers have biases that balance experts (as DeepSeek-V3's), on one rank without Ray.

router_rank.py MODEL_FOLDER OVERRIDES, a JSON list of lists. Writes a JSON list to standard output: for each list of
overrides what training changed.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.policy import moe
from nemo_rl_lite.policy import worker as worker_module
from nemo_rl_lite.policy.model import MegatronModel
from nemo_rl_lite.policy.worker import MegatronWorker
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import policy_arguments
from tests.functional.embedded import OF_THE_EMBEDDED
from tests.functional.rank import leave

build_model = worker_module.build_model


def with_biases(*arguments: Any, **options: Any) -> MegatronModel:
    """The model, whose routers get what those of a model with biases have: no such model is small."""
    model = build_model(*arguments, **options)
    for router in moe._routers(model.chunks):
        router.enable_expert_bias, router.score_function = True, "sigmoid"
        router.config.moe_router_enable_expert_bias = True
        count = router.config.num_moe_experts
        del router.local_tokens_per_expert, router.expert_bias
        router.register_buffer("local_tokens_per_expert", torch.zeros(count), persistent=False)
        router.register_buffer("expert_bias", torch.zeros(count))
    return model


def main(model_folder: str, cases: str) -> None:
    worker_module.build_model = with_biases
    found = [changes(model_folder, overrides) for overrides in json.loads(cases)]
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()


def changes(model_folder: str, overrides: list[str]) -> dict[str, float]:
    # The rules know that routers of this kind of model have no biases.
    rates = [float(one.rpartition("=")[2]) for one in overrides if "moe_router_bias_update_rate=" in one]
    others = [one for one in overrides if "moe_router_bias_update_rate=" not in one]
    config = compose_config([f"policy.model_name={model_folder}", *OF_THE_EMBEDDED, *others])
    megatron = replace(config.policy.megatron_cfg, moe_router_bias_update_rate=sum(rates))
    config = replace(config, policy=replace(config.policy, megatron_cfg=megatron))
    worker = MegatronWorker(**policy_arguments(config, Path(model_folder)) | {"keep_reference": True, "threads": 1})
    model, source = worker._model, torch.Generator().manual_seed(1)
    weights = {name: value.clone() for name, value in model.bare_chunks[0].named_parameters() if "router" in name}
    assert weights and len(moe.expert_biases(model.chunks)) == 4
    tokens = torch.randint(4, 60, (8, 12), generator=source).tolist()
    loss = GRPOLoss(config.options(GRPOConfig).loss_fn)

    def step(advantage: float) -> None:
        rows = [TokenRow(own, [place > 4 for place in range(12)], [-1.0] * 12, advantage) for own in tokens]
        worker.put_batch(rows)
        worker.prepare_for_logprob()
        worker.score(("previous", "reference"), loss.counts(rows))
        worker.prepare_for_training()
        worker.train(loss, loss.counts(rows))

    def biases() -> torch.Tensor:
        return torch.stack(moe.expert_biases(model.chunks)).clone()

    def reference() -> torch.Tensor:
        return worker._held["train"].reference_logprobs

    started = biases()
    step(0.0)
    first, moved = reference(), biases()
    step(math.nan)
    skipped = (biases() - moved).abs().max().item()
    step(1.0)
    after = dict(model.bare_chunks[0].named_parameters())
    found = {
        "bias": (moved - started).abs().max().item(),
        "bias of a skipped step": skipped,
        "reference": (reference() - first).abs().max().item(),
        "router": max((after[name] - value).abs().max().item() for name, value in weights.items()),
    }
    leave(worker)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
