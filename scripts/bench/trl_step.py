"""Seconds of a GRPO step of TRL with a vLLM engine on the same GPU, for the tasks of speed_ablation.py.

trl_step.py {small|large} MODEL [--steps 11] [--lora DIM]

Needs `trl` in addition to this project's packages, and with `--lora` `peft`, whose adapters on all linear layers have
DIM dimensions. `small`: sums of one-digit numbers, up to 32 new tokens, float32
weights in bfloat16 autocast. `large`: 512 new tokens each, bfloat16, layers recompute their activations. Both: 64 x 8
responses, one optimizer step a rollout, no KL penalty, the engine sleeps while the policy trains. The first three steps
do not count. The record is written after each of the others.
"""

import argparse
import os
import random
import re
import tempfile
import time
from typing import Any

import record

WARM = 3
PROMPTS, RESPONSES = 64, 8
NEW = {"small": 32, "large": 512}
MICRO_BATCH = {"small": 128, "large": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=NEW)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--lora", type=int, metavar="DIM")
    given = parser.parse_args()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29577",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    measure(given.task, given.model, given.steps, given.lora)


def keep(task: str, lora: int | None, seconds: list[float], gpu_bytes: list[float]) -> None:
    """Write the record of the steps so far. `gpu_bytes`: of the GPU in use after each."""
    if len(seconds) > WARM:
        name, bench = f"TRL, {task}", f"speed-trl-{task}"
        if lora is not None:
            name, bench = f"{name}, LoRA of {lora} dimensions", f"lora-trl-{task}-{lora}"
        in_use = [nbytes / 2**30 for nbytes in gpu_bytes[WARM:]]
        results = [record.result("whole step", name, "s", seconds[WARM:])]
        results.append(record.result("GPU in use after training", name, "GiB", in_use))
        print(name, results[0]["reps"], record.write(bench, results, [], f"TRL {version()}"), flush=True)


def measure(task: str, model: str, steps: int, lora: int | None) -> None:
    """Train for `steps` steps, and keep the seconds of each; with adapters of `lora` dimensions."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.gpu_bytes: list[float] = []
            self._begun = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self._begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self._begun)
            free, total = torch.cuda.mem_get_info()
            self.gpu_bytes.append(total - free)
            keep(task, lora, self.seconds, self.gpu_bytes)

    large = task == "large"
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=MICRO_BATCH[task],
        gradient_accumulation_steps=PROMPTS * RESPONSES // MICRO_BATCH[task],
        num_generations=RESPONSES,
        max_completion_length=NEW[task],
        max_steps=steps,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.5,
        vllm_enable_sleep_mode=True,
        vllm_max_model_length=1024,
        beta=0.0,
        learning_rate=5e-6,
        lr_scheduler_type="constant",
        bf16=True,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=large,
        model_init_kwargs={"dtype": "bfloat16" if large else "float32"},
        generation_kwargs={"min_tokens": NEW[task], "ignore_eos": True} if large else {},
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(sums(PROMPTS * (steps + 1))),
        processing_class=tokenizer,
        callbacks=[Clock()],
        peft_config=None if lora is None else _adapters(lora),
    ).train()


def _adapters(dim: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=dim, lora_alpha=2 * dim, target_modules="all-linear", task_type="CAUSAL_LM")


def sums(count: int) -> list[dict[str, Any]]:
    """Questions for the sum or difference of two one-digit numbers."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        left, right, sign = draw.randint(0, 9), draw.randint(0, 9), draw.choice("+-")
        question = f"State the final answer to the following arithmetic problem: {left} {sign} {right} ="
        answer = left + right if sign == "+" else left - right
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(answer)})
    return rows


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of a response is its answer."""
    found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


def version() -> str:
    from importlib.metadata import version as of

    return of("trl")


if __name__ == "__main__":
    main()
