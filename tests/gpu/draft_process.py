"""An engine on a GPU with a draft head, which sleeps and wakes. Arguments: the model's folder, the head's folder."""

import sys

import torch
from safetensors.torch import load_file

from nemo_rl_lite.generation.vllm.worker import VLLMEngine
from nemo_rl_lite.validation.compose import compose_config
from tests.gpu.test_drafts import speculating
from tests.gpu.test_run import SMALL

model_folder, head = sys.argv[1:]
own = ["cluster.gpus_per_node=1", f"policy.model_name={model_folder}", "generation.colocated.sleep=true"]
config = compose_config([*SMALL, *own, *speculating(head)])
engine = VLLMEngine(config.generation, config.policy, model_folder, seed=0, on_gpu=True)
assert engine._engine.vllm_config.use_v2_model_runner


def draft(worker) -> dict[str, torch.Tensor]:
    """Return copies of the draft's tensors, and of those that it shares with the policy."""
    model = worker.model_runner.get_draft_model()
    return {name: one.cpu().clone() for name, one in (*model.named_parameters(), *model.named_buffers())}


def shares_its_embedding(worker) -> bool:
    draft, policy = worker.model_runner.get_draft_model(), worker.model_runner.get_model()
    return draft.model.embed_tokens is policy.model.embed_tokens


def graphs(worker) -> set[int]:
    """Return the tokens of a request in the captured decode steps."""
    return {graph.uniform_token_count for graph in worker.model_runner.cudagraph_manager.graphs}


(before,), (shares,), (lengths,) = (
    engine._engine.collective_rpc(call) for call in (draft, shares_its_embedding, graphs)
)
assert shares and lengths == {1, 4}, (shares, lengths)
written = load_file(f"{head}/model.safetensors")
# The policy's weights are random until the first refit; the head's are its own.
torch.testing.assert_close(before["model.fc.weight"], written["fc.weight"].bfloat16(), rtol=0, atol=0)
torch.testing.assert_close(before["lm_head.weight"][: len(written["d2t"])], written["lm_head.weight"].bfloat16())
for _ in range(2):
    engine.sleep()
    # Other work uses the memory.
    torch.full((2**30,), 7, dtype=torch.uint8, device="cuda")
    engine.wake_weights()
    engine.wake_cache()
    (after,) = engine._engine.collective_rpc(draft)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        if "embed_tokens" not in name:
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, msg=name)
