"""Measure TRL on the tasks of this project's records, and compare the two.

trl_step.py grpo MODEL [--steps 11] [--micro-batch 8] [--lora DIM]    TRL's GRPO step with vLLM on the same GPU
trl_step.py sft MODEL CHATS.jsonl [--steps 12] [--tokens 4096]        SFTTrainer with packing, and ours, in one run
trl_step.py ratio WAY [--folder FOLDER]                               steps of `ways.py speed` over TRL's fastest

Needs `trl` in addition to this project's packages, and with `--lora` `peft`. GRPO: 64 x 8 responses of 512 tokens, a
model of 1.7 B parameters in bfloat16 with recomputed layers, one optimizer step per rollout, no KL penalty, an engine
that sleeps while the policy trains. SFT: all weights, bfloat16 computation, Adam, no recomputation, rows of CHATS with
`prompt` and `answer`. The first three steps do not count.
"""

import argparse
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import record
from whole_runs import KNOWN_MODEL, STEPS_ALONE, one_run, tiny_model, tried

WARM = 3
PROMPTS, RESPONSES, NEW = 64, 8, 512
LONGEST, BATCH = 512, 128
TARGET = 0.36
OURS, THEIRS = "nemo_rl_lite", "TRL's SFTTrainer, packed"
ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("grpo")
    part.add_argument("model")
    part.add_argument("--steps", type=int, default=11)
    part.add_argument("--micro-batch", type=int, default=8)
    part.add_argument("--lora", type=int, metavar="DIM")
    part = parts.add_parser("sft")
    part.add_argument("model")
    part.add_argument("chats", type=Path)
    part.add_argument("--steps", type=int, default=12)
    part.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    part.add_argument("--rates", type=Path, help="measure TRL alone in this process, and write its rates here")
    part = parts.add_parser("ratio")
    part.add_argument("way")
    part.add_argument("--folder", type=Path, default=record.FOLDER)
    given = parser.parse_args(arguments)
    {"grpo": grpo, "sft": sft, "ratio": ratio}[given.part](given)


class Clock:
    """The seconds of each step of a trainer of TRL, and the GPU's bytes in use after it."""

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


def grpo(given: argparse.Namespace) -> None:
    """Train for some steps, and keep the record after each that counts."""
    os.environ |= ALONE | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    small = not torch.cuda.is_available()
    prompts, responses, new = (1, 2, 4) if small else (PROMPTS, RESPONSES, NEW)
    micro_batch = prompts * responses if small else given.micro_batch
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.5,
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": 1024,
        "bf16": True,
        "gradient_checkpointing": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=prompts * responses // micro_batch,
            num_generations=responses,
            max_completion_length=new,
            max_steps=given.steps,
            beta=0.0,
            learning_rate=5e-6,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            model_init_kwargs={"dtype": "float32" if small else "bfloat16"},
            generation_kwargs={} if small else {"min_tokens": new, "ignore_eos": True},
            **({"use_cpu": True, "bf16": False} if small else engine),
        )
        trainer = GRPOTrainer(
            model=given.model,
            reward_funcs=_reward,
            args=settings,
            train_dataset=Dataset.from_list(_sums(prompts * (given.steps + 1))),
            processing_class=tokenizer,
            peft_config=None if given.lora is None else _adapters(given.lora),
        )
        clock = Clock(trainer, lambda: _keep(given, clock))
        trainer.train()


def _keep(given: argparse.Namespace, clock: Clock) -> None:
    """Write the record of the steps so far."""
    if len(clock.seconds) <= WARM:
        return
    bench = "speed-trl-large" if given.micro_batch == 8 else f"speed-trl-mb{given.micro_batch}-large"
    bench = bench if given.lora is None else f"lora-trl-large-{given.lora}"
    results = [record.result("step time", "TRL, large", "s", clock.seconds[WARM:])]
    if clock.gpu_bytes:
        in_use = [nbytes / 2**30 for nbytes in clock.gpu_bytes[WARM:]]
        results.append(record.result("GPU in use after training", "TRL, large", "GiB", in_use))
    print(record.write(bench, results, [], f"TRL {version('trl')}"), results[0]["reps"], flush=True)


def _adapters(dim: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=dim, lora_alpha=2 * dim, target_modules="all-linear", task_type="CAUSAL_LM")


def _sums(count: int) -> list[dict[str, Any]]:
    """Return questions for the sum or difference of two one-digit numbers."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        left, right, sign = draw.randint(0, 9), draw.randint(0, 9), draw.choice("+-")
        question = f"State the final answer to the following arithmetic problem: {left} {sign} {right} ="
        answer = left + right if sign == "+" else left - right
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(answer)})
    return rows


def _reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 where the last number of a response is its answer."""
    found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


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


def ratio(given: argparse.Namespace) -> None:
    """Compare a way of `ways.py speed` with the fastest of TRL's micro-batches that the folder has on the same
    hardware."""
    ours = _newest(given.folder, "speed-ablation-large-*.json")
    found = sorted(given.folder.glob(f"speed-trl-*large-{ours['hardware']['name']}.json"))
    rivals = {_micro_batch(file): json.loads(file.read_text()) for file in found}
    steps = {size: _steps(one, "TRL, large") for size, one in rivals.items()}
    mine, best = _steps(ours, given.way), min(steps, key=lambda size: statistics.median(steps[size]))
    results = [record.result("step time", f"nemo_rl_lite, {given.way}", "s", mine)]
    results += [record.result("step time", f"TRL, micro-batches of {size}", "s", steps[size]) for size in sorted(steps)]
    value = statistics.median(mine) / statistics.median(steps[best])
    bars = [record.bar("step, ours over TRL's at its best, medians", value, TARGET, at_least=False)]
    origin = {name: ours[name] for name in ("date", "commit", "hardware", "versions")}
    origin |= {"command": shlex.join(["python", "scripts/bench/trl_step.py", "ratio", given.way])}
    origin |= {"note": f"{rivals[best]['note']}; its fastest micro-batch has {best} sequences"}
    print(record.save("speed-over-trl-large", origin, results, bars), bars[0]["value"])


def _newest(folder: Path, pattern: str) -> dict[str, Any]:
    return max((json.loads(file.read_text()) for file in folder.glob(pattern)), key=lambda one: one["date"])


def _micro_batch(file: Path) -> int:
    sized = re.match(r"speed-trl-mb(\d+)-", file.name)
    return int(sized[1]) if sized else 8


def _steps(measured: dict[str, Any], config: str) -> list[float]:
    return next(one["reps"] for one in measured["results"] if (one["name"], one["config"]) == ("step time", config))


def trial() -> None:
    """Take TRL's steps on CPUs with transformers' generation, and compare with ours."""
    own, model = Path(os.environ["NRL_BENCH_OUT"]), str(tiny_model())
    before = dict(os.environ)
    main(["grpo", model, "--steps", "4"])
    chats = own / "chats.jsonl"
    chats.write_text('{"prompt": "12", "answer": "21"}\n' * 64)
    with tried():
        ours, _ = one_run(["algorithm=sft", f"policy.model_name={KNOWN_MODEL}"], WARM)
    theirs = _rates_of_trl(model, chats, 4, 32)
    _write_sft("tiny", {OURS: [step["performance/tokens_per_sec"] for step in ours], THEIRS: theirs})
    os.environ.clear()
    os.environ.update(before)
    trl = json.loads(next(own.glob("speed-trl-large-*.json")).read_text())
    results = [record.result("step time", "way", "s", [1.0])]
    record.save("speed-ablation-large", {name: trl[name] for name in trl if name not in ("bench", "bars")}, results, [])
    main(["ratio", "way", "--folder", str(own)])


if __name__ == "__main__":
    record.start(main, trial)
