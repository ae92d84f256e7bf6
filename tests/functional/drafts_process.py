"""An engine with a draft model in a separate process.

It starts as on a GPU: with random weights, but the draft's own. Results are written to a file.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import torch

from nemo_rl_lite.compat.vllm import DRAFT_ONLY
from nemo_rl_lite.generation.interface import Completion, Request, Sampling
from nemo_rl_lite.generation.vllm.switch import DecodeStep, DraftSwitch
from nemo_rl_lite.generation.vllm.worker import VLLMEngine
from nemo_rl_lite.validation.compose import compose_config

model_folder, source, output, *options = sys.argv[1:]
options += [f"policy.model_name={model_folder}", "policy.max_total_sequence_length=64"]
options += [f"+generation.vllm_kwargs.load_format={DRAFT_ONLY}"]
config = compose_config(options)
engine = VLLMEngine(config.generation, config.policy, model_folder, seed=0, on_gpu=False)
prompts = [[1, 5, 6, 7, 8, 41], [1, 9, 41]]
sampling = Sampling(0.8, 1.0, None, 24, stop_token_ids=(), stop_strings=())


class Steady(DraftSwitch):
    """Drafts from the second decode step on."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts = False

    def observe(self, step: DecodeStep) -> None:
        self.drafts = True


class Flipping(DraftSwitch):
    """Pauses or resumes drafts after every third step."""

    seen = 0

    def observe(self, step: DecodeStep) -> None:
        self.seen += 1
        self.drafts = self.seen // 3 % 2 == 0


def generate(sampling: Sampling, switch: DraftSwitch) -> tuple[list[Completion], dict[str, float]]:
    """Two responses to each prompt, and the metrics of their drafts."""
    engine._drafting._switch = switch
    asked = [Request(tuple(prompt), sampling, seed) for seed, prompt in enumerate([*prompts, *prompts])]
    asked = [asked[0], asked[2], asked[1], asked[3]]
    engine.submit(dict(enumerate(asked)))
    found: dict[int, Completion] = {}
    while len(found) < len(asked):
        found |= engine.step()
    return [done for _, done in sorted(found.items())], engine.take_decoded().drafts.metrics()


def refit(name: str) -> None:
    engine.join_refit([pickle.loads(Path(source + name).read_bytes())])
    engine.receive_weights(1)


def shares_its_embedding(worker) -> bool:
    draft, policy = worker.model_runner.get_draft_model(), worker.model_runner.get_model()
    return draft.model.embed_tokens is policy.model.embed_tokens


def positions(worker) -> int:
    """Return the length of the draft's rotary table."""
    buffers = dict(worker.model_runner.get_draft_model().named_buffers())
    return min(table.shape[0] for name, table in buffers.items() if name.endswith("cos_sin_cache"))


def survives_a_sleep(worker) -> bool:
    """Return whether a draft is restored after its memory was lost, and the policy not written."""
    worker.keep_draft()
    tensors = worker._draft_tensors()
    before = [tensor.clone() for tensor in tensors]
    embedding = worker.model_runner.get_model().model.embed_tokens.weight
    for tensor in tensors:
        tensor.zero_()
    embedding.data[0, 0] += 1
    marked = embedding.data.clone()
    worker.restore_draft()
    whole = all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
    untouched = torch.equal(embedding.data, marked)
    embedding.data[0, 0] -= 1
    return bool(tensors) and whole and untouched


refit(".old")
seen = {
    "prompts": prompts,
    "flipping": generate(sampling, Flipping()),
    "greedy": generate(sampling.greedy(), Steady()),
}
refit(".new")
seen["refitted"] = generate(replace(sampling, temperature=1.0), Flipping())
seen["refitted, greedy"] = generate(sampling.greedy(), Steady())
seen["shares"] = engine._engine.collective_rpc(shares_its_embedding)
seen["positions"] = engine._engine.collective_rpc(positions)
seen["survives"] = engine._engine.collective_rpc(survives_a_sleep)
Path(output).write_bytes(pickle.dumps(seen))
