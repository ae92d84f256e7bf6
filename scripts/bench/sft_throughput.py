"""Compare tokens a second of supervised fine-tuning with TRL's SFTTrainer with packing, in one run on one device.

sft_throughput.py MODEL CHATS.jsonl [STEPS [TOKENS]]     rows with `prompt` and `answer`, such as GSM8K's renamed

Both train all weights of the same model on the same chats, in bfloat16 on a GPU, with Adam and no recomputation, in
micro-batches of TOKENS (16 k). Steps after the first three count. MFU is 6 FLOPs a parameter and token (attention left
out) over the device's dense bfloat16 peak.
"""

import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import record
import torch
from whole_runs import STEPS_ALONE, one_run

ON_GPU = torch.cuda.is_available()
WARM_UP = 3
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
LONGEST, BATCH, TOKENS = (512, 128, 16384) if ON_GPU else (64, 8, 256)
# A TRL step has this many tokens: as many as the package's batch, or a few more.
STEP_TOKENS = 2 * TOKENS
OURS, THEIRS = "nemo_rl_lite", "TRL's SFTTrainer, packed"


def main() -> None:
    if sys.argv[1] == "trl":
        train_with_trl(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6]))
        return
    model, chats = sys.argv[1:3]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 12
    tokens = int(sys.argv[4]) if len(sys.argv) > 4 else TOKENS
    ours = train_with_ours(model, chats, steps, tokens)
    theirs = _in_a_process_of_its_own(model, chats, steps, tokens)
    results, medians = [], {}
    for name, rates in ((OURS, ours), (THEIRS, theirs)):
        results.append(record.result("tokens a second and device", name, "1/s", rates))
        medians[name] = results[-1]["median"]
        if ON_GPU:
            flops = [6 * parameters(model) * rate for rate in rates]
            peak = next(value for gpu, value in PEAK_FLOPS.items() if gpu in torch.cuda.get_device_name())
            results.append(record.result("MFU", name, "share", [one / peak for one in flops]))
    bars = [record.bar("times faster than TRL", medians[OURS] / medians[THEIRS], 1, at_least=True)]
    print(record.write(f"sft-throughput-{Path(model).name}", results, bars if ON_GPU else []).read_text())


def train_with_ours(model: str, chats: str, steps: int, tokens: int) -> list[float]:
    """Return the tokens a second of each step that counts, without padding."""
    layout = ["policy=megatron_gpu", "cluster.gpus_per_node=1"] if ON_GPU else []
    overrides = [
        *("algorithm=sft", "data=file", f"data.train_path={chats}", "data.too_long=drop", *layout, *STEPS_ALONE),
        *("algorithm.max_num_epochs=null", f"algorithm.max_num_steps={steps}", f"policy.model_name={model}"),
        *(f"policy.max_total_sequence_length={LONGEST}", f"policy.train_global_batch_size={BATCH}"),
        "policy.sequence_packing.enabled=true",
        f"policy.sequence_packing.train_mb_tokens={tokens}",
        "policy.megatron_cfg.optimizer.lr=1e-5",
    ]
    return [step["performance/tokens_per_sec"] for step in one_run(overrides, WARM_UP)[0]]


def _in_a_process_of_its_own(model: str, chats: str, steps: int, tokens: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rates.json"
        command = [sys.executable, __file__, "trl", model, chats, str(steps), str(tokens), str(target)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads(target.read_text())


def train_with_trl(model: str, chats: str, steps: int, tokens: int, target: Path) -> None:
    """Write the tokens a second of each step that counts."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in Path(chats).read_text().splitlines()]
    examples = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        }
        for row in rows
    ]

    ends = list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if ON_GPU:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            max_steps=steps,
            max_length=LONGEST,
            packing=True,
            per_device_train_batch_size=tokens // LONGEST,
            gradient_accumulation_steps=STEP_TOKENS // tokens,
            bf16=ON_GPU,
            use_cpu=not ON_GPU,
            gradient_checkpointing=False,
            learning_rate=1e-5,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
        )
        # Master weights are float32 on both sides.
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        trainer = SFTTrainer(policy, settings, train_dataset=Dataset.from_list(examples), callbacks=[Clock()])
        trainer.train()
    a_pack = sum(map(len, trainer.train_dataset["input_ids"])) / len(trainer.train_dataset)
    a_step = a_pack * STEP_TOKENS / LONGEST
    times = [end - begin for begin, end in pairwise(ends)]
    target.write_text(json.dumps([a_step / seconds for seconds in times[WARM_UP - 1 :]]))


def parameters(model: str) -> int:
    from nemo_rl_lite.models.shape import read_model_shape
    from nemo_rl_lite.planning.memory import parameter_count

    return parameter_count(read_model_shape(model))


if __name__ == "__main__":
    main()
