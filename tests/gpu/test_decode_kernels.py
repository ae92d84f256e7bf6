"""Attention and samples of a decoding step by the launcher's kernels, and repeated batches."""

import os
from pathlib import Path

import pytest
import torch

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.validation.compose import compose_config
from tests.decode_kernel_cases import SMALL, Batch, check_attention, check_distribution, check_samples
from tests.functional.conftest import PYTHONPATH
from tests.functional.ranks import run_script
from tests.gpu.test_run import SMALL as RUN

LARGE = (
    Batch(512, 600, 16, 8, 128),
    Batch(256, 3000, 32, 8, 128, most=32768),
    Batch(3, 9000, 9, 3, 64, most=9000),
    Batch(20, 1000, 16, 2, 256, 32, 4096),
    Batch(130, 500, 64, 8, 64),
)


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [False, True])
def test_attention_is_what_torch_computes(heads_first):
    torch.manual_seed(1)
    for batch in (*SMALL, *LARGE):
        check_attention(batch, "cuda", torch.bfloat16, heads_first)


@pytest.mark.gpu
def test_samples_have_the_distribution_of_the_logits():
    torch.manual_seed(1)
    for vocabulary in (50, 4096, 151_936):
        for dtype in (torch.bfloat16, torch.float32):
            check_samples(vocabulary, "cuda", dtype)
    check_distribution(30_000, "cuda")


@pytest.mark.gpu
def test_repeated_batches_give_the_tokens_of_prepared_ones(gpu_model, tmp_path):
    own = ENGINES["vllm"].environment(compose_config([*RUN, "cluster.gpus_per_node=1"]).generation, True)
    environ = dict(os.environ) | own | {"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"}
    run_script(Path(__file__).with_name("repeats_process.py"), [gpu_model], environ, tmp_path / "log")
