"""What a refit of large models would cost, from what small ones were measured to cost: refit_cost.py

A calculation, not a measurement: weights in bfloat16; the rate inside a host and the cost of exporting a tensor are
those of the records in docs/benchmarks; between hosts one link of 400 Gb/s a GPU is assumed, with nothing lost.
"""

import json
import sys
from dataclasses import dataclass

import record

LINK_BYTES_PER_S, LINKS_PER_HOST = 50e9, 8
BY_THE_BRIDGE = "tp2, all ranks: megatron-bridge's export"
# Of Qwen3-8B's shape: 36 layers of 11, embedding, norm and output layer.
TENSORS_OF_8B = 36 * 11 + 3


@dataclass(frozen=True)
class Model:
    """Sizes as published. An engine of `hosts` hosts with eight GPUs holds it."""

    parameters: float
    layers: int
    dense_tensors: int
    """Of a layer, without experts."""
    experts: int
    dense_layers: int
    hosts: int

    @property
    def tensors(self) -> int:
        """Three weights an expert, and embedding, norm and output layer."""
        return self.layers * self.dense_tensors + (self.layers - self.dense_layers) * self.experts * 3 + 3


MODELS = {
    "Llama-3.1-70B": Model(70.6e9, layers=80, dense_tensors=9, experts=0, dense_layers=80, hosts=1),
    "Qwen3-235B-A22B": Model(235.1e9, layers=94, dense_tensors=9, experts=128, dense_layers=0, hosts=1),
    "DeepSeek-V3 (671 B)": Model(671e9, layers=61, dense_tensors=13, experts=256, dense_layers=3, hosts=2),
}


def main() -> None:
    wire = max(_medians("refit-apart-qwen3-8b-2x-h200", "transfer alone")) * 1e9
    export = _medians("refit-export-qwen3-8b-2x-h200", "export", BY_THE_BRIDGE)[0] / TENSORS_OF_8B
    results = []
    for name, model in MODELS.items():
        nbytes = 2 * model.parameters
        results += [
            record.result("weights", name, "GB", [nbytes / 1e9]),
            record.result("tensors", name, "", [model.tensors]),
            record.result("megatron-bridge's export", name, "s", [model.tensors * export]),
            record.result("broadcast inside a host", name, "s", [nbytes / wire]),
            record.result("broadcast between hosts", name, "s", [nbytes / LINK_BYTES_PER_S]),
            record.result(
                "shard to shard between hosts", name, "s", [nbytes / (LINK_BYTES_PER_S * LINKS_PER_HOST * model.hosts)]
            ),
        ]
    sys.stdout.write(record.write("refit-cost-predicted", results, []).read_text())


def _medians(bench: str, name: str, setting: str | None = None) -> list[float]:
    found = json.loads((record.FOLDER / f"{bench}.json").read_text())
    rows = [row for row in found["results"] if row["name"] == name]
    return [row["median"] for row in rows if setting is None or row["config"] == setting]


if __name__ == "__main__":
    main()
