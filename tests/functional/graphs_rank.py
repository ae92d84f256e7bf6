"""One policy rank without Ray that trains with several losses: as without graphs (`plain`), in the shapes of graphs
(`again`), and with CUDA graphs (`graphs`).

graphs_rank.py MODEL_FOLDER OUTPUT_FILE OVERRIDES WAYS, two JSON lists. Writes what each way measured, step by step, and
its weights.
"""

import json
import pickle
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, ORPOConfig
from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.distillation import SampledKLLoss, TopkKLLoss
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import Loss
from nemo_rl_lite.losses.supervised import DPOLoss, KTOLoss, ORPOLoss, SFTLoss
from nemo_rl_lite.policy.graphs import KEY, MicroBatchGraphs, Results
from nemo_rl_lite.policy.memory import gradient_buffers
from nemo_rl_lite.policy.worker import MegatronWorker
from nemo_rl_lite.validation.compose import compose_config
from tests.functional.embedded import OF_THE_EMBEDDED
from tests.functional.rank import policies
from tests.functional.sync_rank import Copies, Reads

STEPS, ROWS, LONGEST, TOPK = 4, 12, 12, 5
# KTO's baseline in each step: a number of the step that the loss brings.
KL = [0.2, 0.1, 0.4, 0.3]


class Again:
    """Records a function by keeping it: a replay runs it on what its tensors hold then. Counts reads of tensors, for
    which a graph has no place; on a GPU it leaves that to CUDA."""

    def __init__(self) -> None:
        self.reads: dict[str, int] = {}

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        def replay() -> Results:
            if torch.cuda.is_available():
                return function()
            reads = Reads()
            with reads, Copies(reads):
                values, scores = function()
            self.reads |= reads.found
            return values.clone(), {name: one.clone() for name, one in scores.items()}

        return replay

    def clear(self) -> None:
        """Do nothing: functions need no memory."""


class Refusing(Again):
    """Fails as CUDA does where a function waits for the device."""

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        raise RuntimeError("operation not permitted when stream is capturing")


def main(model_folder: str, output_file: str, overrides: str, ways: str) -> None:
    own, found = json.loads(overrides), {}
    impl = {way: "none" if way == "plain" else "full_iteration" for way in json.loads(ways)}
    cases = json.dumps({way: [*own, f"{KEY}={value}"] for way, value in impl.items()})
    for way, config, worker in policies(model_folder, cases, temperature=0.7, keep_reference=False):
        found[way] = run(config, worker, own, way)
    torch.save(found, output_file)


def run(config: Config, worker: MegatronWorker, overrides: list[str], way: str) -> dict[str, Any]:
    """Four steps with each loss, on other rows each time, one more after gradients have moved, and one that fails."""
    recorder = Again()
    worker._train_layout = replace(worker._train_layout, together=2, in_buckets=way != "plain")
    if way == "again":
        worker._graphs = MicroBatchGraphs(worker._model, recorder)
    losses, measured, recorded = (
        losses_of(config, [*OF_THE_EMBEDDED, f"policy.model_name={config.policy.model_name}", *overrides]),
        [],
        [],
    )
    initial = weights_of(worker)
    for name, loss in losses.items():
        for step in range(STEPS):
            measured.append((name, train(worker, loss, step, first_pass=name == "first pass")))
        recorded.append(recorded_by(worker))
    before = [one.data_ptr() for one in gradient_buffers(worker._model)]
    worker._phases.gradients.drop()
    in_the_way = [torch.empty_like(one) if one.numel() else torch.empty(0) for one in gradient_buffers(worker._model)]
    worker._phases.gradients.allocate()
    after = [one.data_ptr() for one in gradient_buffers(worker._model)]
    assert before != after and in_the_way
    measured.append(("moved", train(worker, losses["sft"], 5, first_pass=False)))
    recorded.append(recorded_by(worker))
    found = {"measured": measured, "recorded": recorded, "reads": recorder.reads, "initial": initial}
    found["weights"] = weights_of(worker)
    if way == "again":
        worker._graphs = MicroBatchGraphs(worker._model, Refusing())
        try:
            train(worker, losses["sft"], 0, first_pass=False)
        except TrainingError as error:
            found["refused"] = str(error)
    return found


def recorded_by(worker: MegatronWorker) -> int:
    graphs = worker._graphs
    return graphs.recorded if graphs else 0


def weights_of(worker: MegatronWorker) -> dict[str, Tensor]:
    return {name: one.detach().cpu().clone() for name, one in worker._model.bare_chunks[0].named_parameters()}


def losses_of(config: Any, overrides: list[str]) -> dict[str, Loss]:
    options = config.options(GRPOConfig).loss_fn
    taught = compose_config([*overrides, "algorithm=distillation", "teacher.model_name=embedded:reverse-digits"])
    of_teacher = taught.options(DistillationConfig).loss_fn
    corrected = replace(
        options, use_importance_sampling_correction=True, token_veto_ratio=1e-4, sequence_rejection_ratio=100.0
    )
    return {
        "grpo": GRPOLoss(replace(options, reference_policy_kl_penalty=0.1)),
        "first pass": GRPOLoss(options),
        "corrected": GRPOLoss(corrected),
        "a mean of sequences": GRPOLoss(replace(options, token_level_loss=False)),
        "entropy": GRPOLoss(replace(options, entropy_coef=0.3)),
        "sft": SFTLoss(),
        "dpo": DPOLoss(compose_config(["algorithm=dpo"]).options(DPOConfig)),
        "orpo": ORPOLoss(compose_config(["algorithm=orpo"]).options(ORPOConfig)),
        "kto": KTOLoss(compose_config(["algorithm=kto"]).options(KTOConfig)),
        "good responses": GRPOLoss(replace(options, positive_example_nll_weight=0.1)),
        "a teacher's logprobs": SampledKLLoss(of_teacher),
        "a teacher's largest logits": TopkKLLoss(of_teacher),
    }


def train(worker: MegatronWorker, loss: Loss, step: int, first_pass: bool) -> dict[str, float]:
    """One optimizer step; the loss comes as a copy, as it comes to a worker."""
    rows = rows_of(step)
    loss = loss.with_mismatched_kl(KL[step]) if isinstance(loss, KTOLoss) else loss
    counts, loss = loss.counts(rows), pickle.loads(pickle.dumps(loss))
    worker.prepare_for_training()
    worker.put_batch(rows)
    held, source = worker._held["train"], torch.Generator().manual_seed(100 + step)
    scored = {
        name: -4 + 0.3 * torch.randn(held.tokens.shape, generator=source)
        for name in ("previous_logprobs", "reference_logprobs")
        if name == "reference_logprobs" or not first_pass
    }
    worker._held["train"] = replace(held, **scored)
    trained, mismatch = worker.train(loss, counts, mismatch_counts=counts if first_pass else None)
    # In a first pass, those of the pass.
    previous_BT = worker._held["train"].previous_logprobs
    previous = {f"previous/{place}": value for place, value in enumerate(previous_BT.flatten().tolist())}
    return trained | {f"mismatch/{name}": value for name, value in mismatch.items()} | previous


def rows_of(step: int) -> list[TokenRow]:
    """Rows of other lengths, tokens and masks in each step, with ages as an asynchronous run has them, and with what a
    teacher says of them."""
    source = torch.Generator().manual_seed(step)
    lengths = torch.randint(7, LONGEST + 1, (ROWS,), generator=source).tolist()
    return [
        TokenRow(
            torch.randint(4, 30, (own,), generator=source).tolist(),
            [place >= 4 + step % 2 for place in range(own)],
            (-4 + 0.3 * torch.randn(own, generator=source)).tolist(),
            torch.randn((), generator=source).item(),
            [int(place >= 4) * (row % 2) for place in range(own)],
            reward=float(row % 3 == 0),
            **_of_teacher(own, source),
        )
        for row, own in enumerate(lengths)
    ]


def _of_teacher(tokens: int, source: torch.Generator) -> dict[str, Any]:
    logits = 2 * torch.randn(tokens, TOPK, generator=source)
    return {
        "teacher_logprobs": (-4 + 0.3 * torch.randn(tokens, generator=source)).tolist(),
        "teacher_topk_logits": logits.sort(dim=-1, descending=True).values.tolist(),
        "teacher_topk_ids": [(4 + torch.randperm(26, generator=source)[:TOPK]).tolist() for _ in range(tokens)],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
