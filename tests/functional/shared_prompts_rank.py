"""One policy rank without Ray: an optimizer step on rows that share prompts, in one layout after another.

shared_prompts_rank.py MODEL_FOLDER OUTPUT_FOLDER LAYOUTS, a JSON object of overrides by layout. Rank 0 writes for each:
previous and reference logprobs, metrics, this rank's gradients by name, and the tokens of each micro-batch. In layouts
"... at once", attention layers make queries, keys and values at once, also on CPUs.
"""

import sys

import torch

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.policy import attention_inputs
from nemo_rl_lite.policy.interface import SAVED_WORK
from nemo_rl_lite.policy.micro_batches import cut
from tests.functional.rank import gathered, keep, policies

# Tokens of a prompt, and of its responses. The third group does not fit a pack of 64 tokens.
GROUPS = {9: (8, 3, 11, 6), 20: (5, 2, 7, 4), 30: (12, 20, 9, 16), 4: (6, 6, 6, 6)}


def main(model_folder: str, output_folder: str, layouts: str) -> None:
    for name, config, worker in policies(model_folder, layouts):
        loss, rows = GRPOLoss(config.options(GRPOConfig).loss_fn), sampled_rows()
        if name.endswith("at once"):
            assert attention_inputs.install(worker._model.bare_chunks)
        worker.put_batch(rows)
        worker.score(("previous", "reference"), loss.counts(rows))
        worker.prepare_for_training()
        metrics, _ = worker.train(loss, loss.counts(rows)) or ({}, {})
        batch = worker._held["train"]
        found = {
            "scores": gathered((batch.previous_logprobs, batch.reference_logprobs))[-1],
            "metrics": gathered({key: value for key, value in metrics.items() if key != SAVED_WORK}),
            "saved": metrics.get(SAVED_WORK, 0.0),
            "work": sum(map(worker._model.cost, batch.lengths.tolist())),
            "gradients": gathered(gradients(worker)),
            "tokens": [one.tokens_nS.numel() for one in cut(batch.tokens, batch.lengths, worker._train_layout)],
        }
        keep(found, output_folder, name)


def gradients(worker) -> dict[str, torch.Tensor]:
    chunks = worker._model.chunks
    trained = ((name, own) for chunk in chunks for name, own in chunk.named_parameters() if own.requires_grad)
    return {name: own.main_grad.cpu() for name, own in trained}


def sampled_rows() -> list[TokenRow]:
    source, rows = torch.Generator().manual_seed(1), []
    drawn = lambda count: torch.randint(4, 60, (count,), generator=source).tolist()  # noqa: E731
    for prompt, responses in GROUPS.items():
        first = drawn(prompt)
        for response in responses:
            tokens, mask = first + drawn(response), [False] * prompt + [True] * response
            sampled = (-4 + 0.3 * torch.randn(len(tokens), generator=source)).tolist()
            rows.append(TokenRow(tokens, mask, sampled, torch.randn((), generator=source).item()))
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
