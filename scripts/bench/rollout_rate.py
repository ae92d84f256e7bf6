"""Tokens a second in the generation phase of whole GRPO runs: this checkout against an earlier one, in turn.

rollout_rate.py MODEL --before CHECKOUT [--repeats 1] [--steps 4] [-- OVERRIDE ...]

MODEL: a folder with random weights (random_model.py), whose responses so nearly all have `generation.max_new_tokens`
tokens. 64 prompts x 8 samples x 512 tokens a step; the first step of a run is left out. On CPUs: `--small`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import record
from whole_runs import STEPS_ALONE

TARGET = 1.3
SIZES = [
    *("cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=vllm_gpu", "offload=logprob"),
    *("algorithm.num_prompts_per_step=64", "algorithm.num_generations_per_prompt=8"),
    *("generation.max_new_tokens=512", "policy.max_total_sequence_length=640"),
    *("policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=8192"),
    *("policy.sequence_packing.logprob_mb_tokens=16384", "policy.train_global_batch_size=512"),
    "generation.vllm_cfg.gpu_memory_utilization=0.35",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="the quickstart's sizes, for CPUs")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    own = [*([] if given.small else SIZES), *given.overrides, f"policy.model_name={given.model.resolve()}"]
    rates: dict[str, list[float]] = {"before": [], "now": []}
    for _ in range(given.repeats):
        for name, checkout in (("before", given.before.resolve()), ("now", record.ROOT)):
            found = one_run(checkout, [*own, f"algorithm.max_num_steps={given.steps}"])
            print(name, [round(rate) for rate in found], flush=True)
            rates[name] += found
    results = [
        record.result(f"generation, {name}", " ".join(own[:-1]), "tokens/s", found) for name, found in rates.items()
    ]
    faster = statistics.median(rates["now"]) / statistics.median(rates["before"])
    bars = [record.bar("tokens a second, now over before (medians)", faster, TARGET, True)]
    print(record.write("rollouts-rate", results, bars, f"model: {given.model.name}, random weights"))


def one_run(checkout: Path, overrides: list[str]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nemo_rl_lite.train", f"hydra.run.dir={folder}/run", *STEPS_ALONE, *overrides]
        path = os.pathsep.join([str(checkout), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        done = subprocess.run(command, cwd=checkout, env=os.environ | {"PYTHONPATH": path})
        if done.returncode:
            raise SystemExit(f"status {done.returncode}: {' '.join(command)}")
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    name = "performance/generation_tokens_per_sec"
    return [line[name] for line in lines if name in line and line["step"] > 1]


if __name__ == "__main__":
    main()
