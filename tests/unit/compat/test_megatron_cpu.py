import importlib.util
import re
import sys

import pytest

from nemo_rl_lite.compat import megatron_cpu
from nemo_rl_lite.compat.megatron_cpu import _RewritingLoader, rewrite


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ('torch.zeros(3, device="cuda")', 'torch.zeros(3, device="cpu")'),
        ("torch.zeros(3, device = 'cuda:0')", "torch.zeros(3, device='cpu')"),
        ("torch.cuda.current_device()", "torch.cpu.current_device()"),
        ("torch.cuda.get_rng_state()", "torch.get_rng_state()"),
        ("param.type() == 'torch.cuda.FloatTensor'", "param.type() == 'torch.FloatTensor'"),
        ("model_module.cuda(torch.cuda.current_device())", "model_module.cpu()"),
        ("x = y.cuda()", "x = y.cpu()"),
        ('init_process_group("nccl")', 'init_process_group("gloo")'),
        ("if torch.cuda.is_available():", "if torch.cuda.is_available():"),
    ],
)
def test_rewrite(source, rewritten):
    assert rewrite(source) == rewritten


def test_what_is_compiled_is_kept_apart_from_what_gpu_runs_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source = tmp_path / "place.py"
    source.write_text('place = dict(device="cuda")')

    def place(loader) -> str:
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("place", source, loader=loader))
        loader.exec_module(module)
        return module.place["device"]

    def ours() -> str:
        return place(_RewritingLoader("place", str(source)))

    assert ours() == "cpu"
    (bytecode,) = (tmp_path / "__pycache__").iterdir()
    written = bytecode.stat().st_mtime_ns
    assert ours() == "cpu" and bytecode.stat().st_mtime_ns == written
    assert place(importlib.machinery.SourceFileLoader("place", str(source))) == "cuda" and ours() == "cpu"
    assert len(list((tmp_path / "__pycache__").iterdir())) == 2
    monkeypatch.setattr(megatron_cpu, "_RULES", ((re.compile("cuda"), "other"),))
    assert ours() == "other"
