"""Several passes over a rollout are those of a training loop that is written out with transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.iterations_rank import PROMPT
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

OPTIMIZER, LOSS, LR = "policy.megatron_cfg.optimizer", "algorithm.loss_fn", 0.5
PLAIN_SGD = [
    *(f"{OPTIMIZER}.optimizer=sgd", f"{OPTIMIZER}.use_distributed_optimizer=false", f"{OPTIMIZER}.sgd_momentum=0"),
    *(f"{OPTIMIZER}.lr={LR}", f"{OPTIMIZER}.weight_decay=0", "policy.max_grad_norm=null"),
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    *(f"{LOSS}.reference_policy_kl_penalty=0", f"{LOSS}.ratio_clip_min=0.1", f"{LOSS}.ratio_clip_max=0.1"),
    *("algorithm.num_prompts_per_step=2", "algorithm.num_generations_per_prompt=4"),
]
# Name: optimizer steps of a pass, and passes.
CASES = {"one pass": (2, 1), "three passes": (1, 3), "two passes of two steps": (2, 2)}


@pytest.fixture(scope="module")
def outcomes(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("iterations")
    sizes = {name: 8 // steps for name, (steps, _) in CASES.items()}
    batches = {
        name: [f"policy.{key}={size}" for key in ("train_global_batch_size", "train_micro_batch_size")]
        for name, size in sizes.items()
    }
    cases = {
        name: [*PLAIN_SGD, *batches[name], f"algorithm.num_iterations={passes}"] for name, (_, passes) in CASES.items()
    }
    script = Path(__file__).with_name("iterations_rank.py")
    run_ranks(script, [str(model_folder), str(folder), json.dumps(cases)], 1)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_all_passes_compare_with_the_weights_before_the_first_one(outcomes, model_folder, name):
    from transformers import AutoModelForCausalLM

    steps, passes = CASES[name]
    saved = torch.load(outcomes / name.replace(" ", "-"), weights_only=False)
    tokens, advantages = saved["tokens"], saved["advantages"]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}

    def logprobs(rows: torch.Tensor) -> torch.Tensor:
        found = model(rows).logits.log_softmax(-1)[:, :-1].gather(-1, rows[:, 1:, None]).squeeze(-1)
        return found[:, PROMPT - 1 :]

    with torch.no_grad():
        previous = logprobs(tokens)
    losses, clipped, optimizer = [], [], torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(passes):
        for part in torch.arange(len(tokens)).chunk(steps):
            ratio, gain = (logprobs(tokens[part]) - previous[part]).exp(), advantages[part, None]
            loss = -torch.minimum(ratio * gain, ratio.clamp(0.9, 1.1) * gain).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            clipped.append(((ratio > 1.1) & (gain > 0)).float().mean().item())
    mean = {"loss": sum(losses) / len(losses), "clip_ratio/high": sum(clipped) / len(clipped), "lr": LR}
    assert len(losses) == steps * passes and {key: saved["metrics"][key] for key in mean} == pytest.approx(
        mean, abs=1e-5
    )
    assert (mean["clip_ratio/high"] > 0) == (passes > 1 or steps > 1)
    trained = load_file(f"{outcomes / name.replace(' ', '-')}.hf/model.safetensors")
    # Weights move by up to 2, and rounding differs between CPUs.
    assert all(torch.allclose(trained[key], model.state_dict()[key], atol=1e-4) for key in trained)
    assert max((trained[key] - before[key]).abs().max().item() for key in trained) > 1e-3


def test_every_token_is_compared_with_the_engines_once(outcomes):
    """In a pass before training, or in the first training pass."""
    found = [torch.load(outcomes / name.replace(" ", "-"), weights_only=False)["metrics"] for name in CASES]
    errors = [metrics["token_mult_prob_error"] for metrics in found]
    assert errors == pytest.approx([errors[0]] * len(errors), rel=1e-5) and errors[0] > 1
