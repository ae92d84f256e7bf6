"""One policy rank without Ray, in one layout after another: optimizer steps in a row, with nothing between them that
would complete the weights; then everything that reads weights.

overlap_rank.py MODEL_FOLDER OUTPUT_FOLDER LAYOUTS, a JSON object of overrides by layout. Rank 0 writes what all ranks
found to a file for each.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.policy.worker import MegatronWorker
from tests.functional.policy_rank import assembled_is_the_export
from tests.functional.rank import gathered, keep, path_of, policies

ROWS, LENGTH, STEPS = 16, 12, 3


def main(model_folder: str, output_folder: str, layouts: str) -> None:
    for name, config, worker in policies(model_folder, layouts, keep_reference=True):
        keep(gathered(run(config, worker, path_of(output_folder, name))), output_folder, name)
        dist.barrier()


def run(config: Config, worker: MegatronWorker, output: Path) -> dict[str, Any]:
    place, source = worker.place(), torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 60, (ROWS, LENGTH), generator=source)
    rows = [
        TokenRow(row.tolist(), [place >= 5 for place in range(LENGTH)], [-1.0] * LENGTH, advantage)
        for row, advantage in zip(tokens, torch.randn(ROWS, generator=source).tolist(), strict=True)
    ]
    # One replica's last micro-batch has nothing to train on, and another's has.
    rows[-2:] = [TokenRow(row.tokens, [False] * LENGTH, row.generation_logprobs, 0.0) for row in rows[-2:]]
    loss = GRPOLoss(config.options(GRPOConfig).loss_fn)
    counts, share = loss.counts(rows), ROWS // place.data_size

    def train() -> tuple[dict[str, float] | None, list[torch.Tensor]]:
        trained = worker.train(loss, counts)
        return trained and trained[0], worker._model.parameters()

    def logprobs() -> Any:
        return worker.logprobs(tokens, torch.full((ROWS,), LENGTH))

    worker.prepare_for_refit(engine_bytes=0)
    worker.plan_refit(config.refit, shared_device=True, consumers=1)
    worker.prepare_for_generation()
    worker.prepare_for_logprob()
    worker.put_batch(rows[place.data_rank * share : (place.data_rank + 1) * share])
    worker.score(("previous", "reference"), counts)
    worker.prepare_for_training()
    steps = [train()[0] for _ in range(STEPS)]
    found = {"place": place, "behind": alike(worker) is False, "steps": steps}
    output.with_suffix(".checkpoint").mkdir(exist_ok=True)
    dist.barrier()
    worker.begin_save(str(output.with_suffix(".checkpoint")))
    found["whole in a save"] = alike(worker)
    worker.finish_save()
    found["logprobs"] = logprobs()
    found["next"] = train()[0]
    worker.prepare_for_refit(engine_bytes=0)
    # Adapters are merged into what is exported, which is no matter of moving elements.
    only_moves = worker._model.lora is None
    found["whole in a refit"] = alike(worker) and (not only_moves or assembled_is_the_export(worker, [0])[0])
    worker.prepare_for_generation()
    worker.prepare_for_training()
    train()
    # Neither the adapters nor the reference must take what other ranks have of the policy.
    worker.score(("reference",), counts)
    found["whole after the reference"] = alike(worker)
    train()
    worker.load(str(output.with_suffix(".checkpoint")))
    found["loaded"], found["next of loaded"] = logprobs(), train()[0]
    worker.export_hf(f"{output}.hf")
    return found


def alike(worker: MegatronWorker) -> bool:
    """Whether this rank has the same weights as the first rank of its data-parallel group; experts that other ranks of
    the group do not have are left out."""
    from megatron.core import parallel_state

    group, same = parallel_state.get_data_parallel_group(), True
    for parameter in worker._model.parameters():
        if getattr(parameter, "allreduce", True):
            first = parameter.detach().clone()
            dist.broadcast(first, dist.get_global_rank(group, 0), group)
            same = same and torch.equal(first, parameter)
    agreed = torch.tensor(float(same))
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


if __name__ == "__main__":
    main(*sys.argv[1:])
