"""How long two data-parallel ranks wait for each other in GRPO's passes, measured: dp_idle.py MODEL

dp_idle.py MODEL [--gpus 2] [--steps 8] [-- OVERRIDE ...]

MODEL: a folder with random weights (random_model.py). 64 prompts x 8 samples a step, two optimizer steps. The lengths
of prompts are lognormal with sigma 1, and those of responses geometric, about 100 tokens before they are cut: each
token ends one with the same chance. So sequences of a prompt are alike in length. A rank's own time is that of its
forward and backward passes, before it meets the other rank (`timing/replicas/...` of a run). The launcher balances the
ranks' shares; the same count of FLOPs by which it does says how long ranks would wait with neighbouring rows. The first
three steps do not count. `--gpus 0` shows on two CPU ranks that the script works.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import batched
from pathlib import Path

import record
from whole_runs import STEPS_ALONE, run_in

from nemo_rl_lite.models.shape import read_model_shape
from nemo_rl_lite.planning.flops import forward_flops
from nemo_rl_lite.policy.megatron.micro_batches import Layout
from nemo_rl_lite.policy.megatron.shares import balanced_shares
from nemo_rl_lite.rollout.store import read_rollout, rollout_files

WARM, RANKS, MEAN, TARGET = 3, 2, 100, 0.05
TASK = [
    *("data=file", "data.answer_column=null", "reward=format", "reward.kwargs.pattern=.*a.*"),
    *("algorithm.loss_fn.reference_policy_kl_penalty=0", "policy.sequence_packing.enabled=true"),
]
# By the number of GPUs: overrides; prompts of a step, samples of a prompt, sequences of an optimizer step; the median
# and the most words of a prompt.
GPU = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=2", "policy.max_total_sequence_length=1024"),
    *("generation.max_new_tokens=256", "generation.vllm_cfg.gpu_memory_utilization=0.4"),
    *("policy.sequence_packing.train_mb_tokens=16384", "policy.sequence_packing.logprob_mb_tokens=16384"),
]
CPU = [
    *("generation=transformers", "cluster.cpu_ranks=2", "generation.max_new_tokens=4"),
    *("policy.max_total_sequence_length=192", "policy.sequence_packing.train_mb_tokens=256"),
]
SIZES = {2: (GPU, (64, 8, 256), (200, 650)), 0: (CPU, (4, 2, 4), (12, 100))}
# The balance does not depend on how many tokens a pack has.
LAYOUT = Layout("packed", 16384, 64)
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
# The metrics of a step's passes, and the name of each in the record.
PHASES = {"train": "training", "logprob": "logprobs"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", type=int, default=2, choices=sorted(SIZES))
    parser.add_argument("--steps", type=int, default=8, help="that count")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    own, (prompts, samples, batch), (median, most) = SIZES[given.gpus]
    own = [*own, *TASK, *STEPS_ALONE, *given.overrides, f"policy.model_name={given.model.resolve()}"]
    vocabulary = json.loads((given.model / "config.json").read_text())["vocab_size"]
    own.append(f"generation.stop_token_ids={list(range(1000, 1000 + vocabulary // MEAN))}".replace(" ", ""))
    own += [f"algorithm.num_prompts_per_step={prompts}", f"algorithm.num_generations_per_prompt={samples}"]
    own += [f"policy.train_global_batch_size={batch}", f"algorithm.max_num_steps={WARM + given.steps}"]
    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder) / "prompts.jsonl", Path(folder) / "run"
        source = random.Random(1)
        rows = [prompt(source, row, median, most) for row in range(prompts * (WARM + given.steps))]
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
        steps = run_in(run, [*own, f"data.train_path={file}"])[WARM:]
        lengths = [lengths_of(one) for one in rollout_files(run)][WARM:]
    results, bars = [], []
    for phase, what in PHASES.items():
        found = [line[f"timing/replicas/idle_share/{phase}"] for line in steps]
        seconds = [line[f"timing/replicas/{phase}"] for line in steps]
        results.append(record.result(f"idle share of {RANKS} ranks, {what}", "balanced, measured", "share", found))
        results.append(record.result(f"the slower rank's {what}", "balanced, measured", "s", seconds))
    bars.append(record.bar("idle share in training, balanced, measured, median", results[0]["median"], TARGET, False))
    shape = read_model_shape(str(given.model))
    if shape is None:
        raise SystemExit(f"{given.model} is a model of unknown shape, whose FLOPs cannot be counted")

    def cost(tokens: float) -> float:
        return forward_flops(shape, tokens)

    for way, shares in {"balanced": balanced, "neighbours": neighbours}.items():
        found = [predicted_idle(own, batch, shares, cost) for own in lengths]
        name = f"idle share of {RANKS} ranks, training"
        results.append(record.result(name, f"{way}, predicted by FLOPs", "share", found))
    for one in results:
        print(f"{one['name']}, {one['config']}: median {one['median']:.4f}, most {max(one['reps']):.4f} {one['unit']}")
    tokens = [length for own in lengths for length in own]
    note = f"model: {given.model.name}; sequences of {min(tokens)} to {max(tokens)} tokens, {sum(tokens)} in all"
    print(record.write("dp-idle", results, bars, note))


def prompt(source: random.Random, row: int, median: int, most: int) -> str:
    """A prompt that no other row has, with a lognormal number of words."""
    words = min(most, max(1, int(median * source.lognormvariate(0, 1))))
    return " ".join([str(row), *source.choices(WORDS, k=words)])


def lengths_of(rollout: Path) -> list[int]:
    """The tokens of each sequence, in the order of the step's rows."""
    return [row["prompt_tokens"] + row["tokens"] for row in read_rollout(rollout)]


def balanced(lengths: Sequence[int], cost: Callable[[float], float]) -> Iterable[Sequence[int]]:
    return balanced_shares(lengths, RANKS, cost, layout=LAYOUT)


def neighbours(lengths: Sequence[int], cost: Callable[[float], float]) -> Iterable[Sequence[int]]:
    return batched(range(len(lengths)), len(lengths) // RANKS)


def predicted_idle(
    lengths: Sequence[int],
    batch: int,
    shares: Callable[[Sequence[int], Callable[[float], float]], Iterable[Sequence[int]]],
    cost: Callable[[float], float],
) -> float:
    """The share of all ranks' time in which they wait for the slowest, over the optimizer steps of `batch` sequences.
    A rank's time is the FLOPs of its sequences, which are packed."""
    work = [[sum(cost(own[row]) for row in share) for share in shares(own, cost)] for own in batched(lengths, batch)]
    return 1 - sum(map(sum, work)) / RANKS / sum(map(max, work))


if __name__ == "__main__":
    main()
