"""Data and settings of short supervised runs, and what transformers says of their models."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

# Of the supervised algorithms; each run is some of these.
SHORT = ("algorithm.max_num_steps=6", "algorithm.max_num_epochs=2")
SFT = [
    *("algorithm=sft", *SHORT, "policy.train_global_batch_size=16", "policy.train_micro_batch_size=8"),
    "policy.megatron_cfg.optimizer.lr=2e-3",
]
OF_PAIRS = [
    *(*SHORT, "policy.train_global_batch_size=8", "policy.train_micro_batch_size=4"),
    "policy.megatron_cfg.optimizer.lr=1e-3",
]
DPO = ["algorithm=dpo", *OF_PAIRS]
PEFT = "policy.megatron_cfg.peft"
LORA = [f"{PEFT}.enabled=true", f"{PEFT}.dim=4", f"{PEFT}.alpha=8", "policy.megatron_cfg.optimizer.lr=1e-2"]


def packed(options: Sequence[str], tokens: int) -> list[str]:
    """The options with packed sequences in place of micro-batches."""
    own = ["policy.sequence_packing.enabled=true", f"policy.sequence_packing.train_mb_tokens={tokens}"]
    return [*(option for option in options if "micro_batch_size" not in option), *own]


def write_data(folder: Path) -> list[str]:
    """Additions with a worked response; 70 rows are 4 batches of 16 and a rest."""
    rows = [
        {"prompt": f"{a}+{b}", "answer": str(a + b), "worked": f"{a} + {b} = {a + b}"}
        for a in range(10)
        for b in range(7)
    ]
    return [*_written(folder, rows, rows[::5]), "data.response_column=worked"]


def write_pairs(folder: Path) -> list[str]:
    """Sums, right and off by one, of different lengths; 28 of 35 are trained on."""
    rows = [
        {"prompt": f"{a}+{b}", "chosen": f"{a} + {b} = {a + b}", "rejected": str(a + b + 1)}
        for a in range(7)
        for b in range(5)
    ]
    return _written(folder, [row for at, row in enumerate(rows) if at % 5], rows[::5])


def write_labelled(folder: Path) -> list[str]:
    """The same sums as pairs have, right or off by one."""
    write_pairs(folder)
    parts = [
        [
            {"prompt": one["prompt"], "completion": one["chosen" if at % 2 else "rejected"], "label": bool(at % 2)}
            for at, one in enumerate(read_rows(folder / f"{name}.jsonl"))
        ]
        for name in ("train", "validation")
    ]
    return _written(folder, *parts)


def _written(folder: Path, train: list[dict], validation: list[dict]) -> list[str]:
    for name, part in (("train", train), ("validation", validation)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return ["data=file", *(f"data.{name}_path={folder / name}.jsonl" for name in ("train", "validation"))]


def read_rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def series(metrics: list[dict], name: str) -> list[float]:
    return [line[name] for line in metrics if name in line]


class Scorer:
    """A model of transformers with its tokenizer."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def logprobs(self, prompt: str, response: str) -> torch.Tensor:
        """Of each token of a response and its end."""
        begin = self._tokenizer(f"<bos>{prompt}=")["input_ids"]
        tokens = torch.tensor([begin + self._tokenizer(f"{response}<eos>")["input_ids"]])
        with torch.no_grad():
            logprobs = self._model(tokens).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, tokens[0, 1:, None])[len(begin) - 1 :, 0]

    def loss(self, rows: list[dict]) -> float:
        """The mean over the tokens of all worked responses."""
        return -torch.cat([self.logprobs(row["prompt"], row["worked"]) for row in rows]).mean().item()
