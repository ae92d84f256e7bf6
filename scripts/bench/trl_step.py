"""Measure TRL on the tasks of this project's records.

trl_step.py grpo MODEL --times FILE [--settings JSON ...] [--prompts 64] [--steps 2] [--lora DIM]
trl_step.py sft MODEL CHATS.jsonl [--steps 12] [--tokens 4096]

Needs `trl` in addition to this project's packages, and with `--lora` `peft`.

`grpo` is a GRPO step with vLLM on the same GPU, 8 responses of 512 tokens per prompt, and no KL penalty. It has one
optimizer step per rollout. Weights and optimizer are bfloat16. The engine sleeps during training, and there is no
correction for its logprobs. A setting has `micro_batch` (sequences), `recompute`, `attention` and `liger` (layer
kernels). All settings share an engine. FILE gets the step times of each setting without its first step, and the errors
of settings.

`sft` measures SFTTrainer with packing, and this project in the same run. It is full fine-tuning with Adam in bfloat16
computation, without recomputation. Rows of CHATS have `prompt` and `answer`. The first three steps do not count.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record
from sum_task import is_right, sums
from whole_runs import KNOWN_MODEL, STEPS_ALONE, Times, one_run, tiny_model, tried

WARM = 3
PROMPTS, RESPONSES, NEW = 64, 8, 512
LONGEST, BATCH = 512, 128
OURS, THEIRS = "nemo_rl_lite", "TRL's SFTTrainer, packed"
PLAIN = {"recompute": False, "attention": "sdpa", "liger": False}
# What may break the process comes last.
SETTINGS = [
    *(PLAIN | {"micro_batch": size} for size in (16, 32, 8, 64)),
    *(PLAIN | {"micro_batch": size, "recompute": True} for size in (32, 64)),
    PLAIN | {"micro_batch": 32, "liger": True},
    *(PLAIN | {"micro_batch": size, "attention": "flash_attention_4"} for size in (16, 32)),
]
ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("grpo")
    part.add_argument("model")
    part.add_argument("--times", type=Path, required=True)
    part.add_argument("--settings", type=json.loads, nargs="+", default=SETTINGS)
    part.add_argument("--prompts", type=int, default=PROMPTS)
    part.add_argument("--steps", type=int, default=2, help="that count, of each setting")
    part.add_argument("--lora", type=int, metavar="DIM")
    part = parts.add_parser("sft")
    part.add_argument("model")
    part.add_argument("chats", type=Path)
    part.add_argument("--steps", type=int, default=12)
    part.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    part.add_argument("--rates", type=Path, help="measure TRL alone in this process, and write its rates here")
    given = parser.parse_args(arguments)
    {"grpo": grpo, "sft": sft}[given.part](given)


class Clock:
    """Step times of a TRL trainer, and the GPU's bytes in use after each step."""

    def __init__(self, trainer: Any, after_step: Any = lambda: None):
        import torch
        from transformers import TrainerCallback

        self.seconds: list[float] = []
        self.gpu_bytes: list[float] = []
        began, clock, on_gpu = [0.0], self, torch.cuda.is_available()

        class Callback(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                if on_gpu:
                    torch.cuda.synchronize()
                began[0] = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                if on_gpu:
                    torch.cuda.synchronize()
                    free, total = torch.cuda.mem_get_info()
                    clock.gpu_bytes.append(total - free)
                clock.seconds.append(time.perf_counter() - began[0])
                after_step()

        trainer.add_callback(Callback())

    def last(self) -> dict[str, float]:
        """Return the quantities of the last step: seconds, and GiB of the GPU in use after it."""
        in_use = {"GPU in use after training": self.gpu_bytes[-1] / 2**30} if self.gpu_bytes else {}
        return {"step time": self.seconds[-1]} | in_use


def grpo(given: argparse.Namespace) -> None:
    """Take steps with each setting."""
    os.environ |= ALONE | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    import torch
    from trl.trainer import grpo_trainer

    grpo_trainer.VLLMGeneration = functools.partial(_shared_engine, {}, grpo_trainer.VLLMGeneration)
    times = Times(given.times)
    for setting in given.settings:
        try:
            _train(given, setting, times)
        except Exception as error:
            times.skip(setting, error)
        gc.collect()
        torch.cuda.empty_cache()


def _shared_engine(made: dict[str, Any], make: Any, model: Any, accelerator: Any, **settings: Any) -> Any:
    """Return the engine of the first trainer, which now serves this one's model."""
    if not made:
        made["engine"] = make(model=model, accelerator=accelerator, **settings)
    engine = made["engine"]
    engine.model, engine.accelerator = model, accelerator
    return engine


def _train(given: argparse.Namespace, setting: dict[str, Any], times: Times) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    small = not torch.cuda.is_available()
    responses, new = (2, 4) if small else (RESPONSES, NEW)
    sequences = given.prompts * responses
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.5,
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": 1024,
        "bf16": True,
    }
    attention = {"attn_implementation": setting["attention"]}
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=setting["micro_batch"],
            gradient_accumulation_steps=sequences // setting["micro_batch"],
            gradient_checkpointing=setting["recompute"],
            use_liger_kernel=setting["liger"],
            num_generations=responses,
            max_completion_length=new,
            max_steps=1 + given.steps,
            beta=0.0,
            vllm_importance_sampling_correction=False,
            learning_rate=5e-6,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            model_init_kwargs=attention | {"dtype": "float32" if small else "bfloat16"},
            generation_kwargs={} if small else {"min_tokens": new, "ignore_eos": True},
            **({"use_cpu": True, "bf16": False} if small else engine),
        )
        trainer = GRPOTrainer(
            model=given.model,
            reward_funcs=_reward,
            args=settings,
            train_dataset=Dataset.from_list(sums(given.prompts * (given.steps + 2))),
            processing_class=tokenizer,
            peft_config=None if given.lora is None else _adapters(given.lora),
        )
        clock = Clock(trainer, lambda: times.add(setting, clock.last()))
        trainer.train()


def _adapters(dim: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=dim, lora_alpha=2 * dim, target_modules="all-linear", task_type="CAUSAL_LM")


def _reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(is_right(one[0]["content"], right)) for one, right in zip(completions, answer, strict=True)]


def sft(given: argparse.Namespace) -> None:
    """Measure both, TRL in a process of its own."""
    if given.rates:
        given.rates.write_text(json.dumps(_rates_of_trl(given.model, given.chats, given.steps, given.tokens)))
        return
    overrides = [
        *("algorithm=sft", "data=file", f"data.train_path={given.chats}", "data.too_long=drop", *STEPS_ALONE),
        *("algorithm.max_num_epochs=null", f"algorithm.max_num_steps={given.steps}"),
        *(f"policy.model_name={given.model}", "policy=megatron_gpu", "cluster.gpus_per_node=1"),
        *(f"policy.max_total_sequence_length={LONGEST}", f"policy.train_global_batch_size={BATCH}"),
        *("policy.sequence_packing.enabled=true", f"policy.sequence_packing.train_mb_tokens={given.tokens}"),
        "policy.megatron_cfg.optimizer.lr=1e-5",
    ]
    rates = {OURS: [step["performance/tokens_per_sec"] for step in one_run(overrides, WARM)[0]]}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rates.json"
        own = [given.model, given.chats, "--steps", given.steps, "--tokens", given.tokens, "--rates", target]
        subprocess.run([sys.executable, __file__, "sft", *map(str, own)], check=True, stdout=sys.stderr)
        rates[THEIRS] = json.loads(target.read_text())
    _write_sft(Path(given.model).name, rates)


def _write_sft(model: str, rates: dict[str, list[float]]) -> None:
    results = [record.result("throughput per device", name, "tokens/s", found) for name, found in rates.items()]
    faster = statistics.median(rates[OURS]) / statistics.median(rates[THEIRS])
    bars = [record.bar("times faster than TRL", faster, 1, at_least=True)]
    print(record.write(f"sft-throughput-{model}", results, bars))


def _rates_of_trl(model: str, chats: Path, steps: int, tokens: int) -> list[float]:
    """Return the tokens per second of each step of TRL that counts. A step has two micro-batches."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    on_gpu, longest = torch.cuda.is_available(), min(LONGEST, tokens)
    examples = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        }
        for row in map(json.loads, chats.read_text().splitlines())
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            max_steps=steps,
            max_length=longest,
            packing=True,
            per_device_train_batch_size=tokens // longest,
            gradient_accumulation_steps=2,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            learning_rate=1e-5,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
        )
        # Master weights are float32 on both sides.
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        trainer = SFTTrainer(policy, settings, train_dataset=Dataset.from_list(examples))
        clock = Clock(trainer)
        trainer.train()
    a_pack = sum(map(len, trainer.train_dataset["input_ids"])) / len(trainer.train_dataset)
    return [a_pack * 2 * tokens / longest / seconds for seconds in clock.seconds[WARM:]]


def trial() -> None:
    """Take TRL's steps on CPUs with transformers' generation, and compare with ours."""
    own, model = Path(os.environ["NRL_BENCH_OUT"]), str(tiny_model())
    before = dict(os.environ)
    settings = [PLAIN | {"micro_batch": size, "recompute": size == 2} for size in (1, 2)]
    tried_settings = map(json.dumps, [PLAIN | {"micro_batch": 2, "attention": "no such"}, *settings])
    main(["grpo", model, "--times", f"{own}/trl.times", "--prompts", "1", "--settings", *tried_settings])
    steps = json.loads((own / "trl.times").read_text())["steps"]
    results = [record.result("step time", name, "s", found["step time"]) for name, found in steps.items()]
    record.write("peers-trl", results, [])
    chats = own / "chats.jsonl"
    chats.write_text('{"prompt": "12", "answer": "21"}\n' * 64)
    with tried():
        ours, _ = one_run(["algorithm=sft", f"policy.model_name={KNOWN_MODEL}"], WARM)
    theirs = _rates_of_trl(model, chats, 4, 32)
    _write_sft("tiny", {OURS: [step["performance/tokens_per_sec"] for step in ours], THEIRS: theirs})
    os.environ.clear()
    os.environ.update(before)


if __name__ == "__main__":
    record.start(main, trial)
