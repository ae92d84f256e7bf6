"""Which models logprobs can be computed of, and by which kernels."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.policy import vocab_chunks
from nemo_rl_lite.policy.logprobs import _implementation, check_scorable
from nemo_rl_lite.policy.vocab_chunks import LMHead


class HybridModel:
    def forward(self, input_ids, position_ids):
        raise AssertionError("not called")


def test_a_model_without_the_hook_is_refused_by_name():
    with pytest.raises(TrainingError, match="megatron-core's HybridModel has no output_processor"):
        check_scorable(HybridModel())


@pytest.mark.parametrize("asked", [{"topk": 3}, {"others": True}, {"soft_cap": 5.0}])
def test_what_the_kernels_leave_out_is_torchs(asked):
    head = LMHead(temperature=1.0, **({"soft_cap": None, "entropy": True, "topk": 0, "group": None} | asked))
    on_gpu = SimpleNamespace(is_cuda=True)
    assert _implementation(on_gpu, head) is vocab_chunks  # pyrefly: ignore  # it is asked for its device alone


def test_the_kernels_give_what_torch_gives(tmp_path):
    """Under Triton's interpreter."""
    # Triton's interpreter runs kernels on a CPU; it must be asked for before Triton is imported.
    program = """
import sys
from pathlib import Path
from tests.linear_scores_cases import alone, check_everything
from nemo_rl_lite.policy import vocab_chunks_kernel

alone(Path(sys.argv[1]))
check_everything(vocab_chunks_kernel, "cpu")
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
