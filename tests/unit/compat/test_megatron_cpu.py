import os
import subprocess
import sys

import pytest

from nemo_rl_lite.compat.megatron_cpu import rewrite

# Prints the modules of the optimizers' classes, after all imports of a policy with LoRA.
CHOICES = """
from importlib.util import find_spec
from nemo_rl_lite.compat.megatron import auto_bridge
auto_bridge()
import megatron.bridge.peft.lora
from megatron.core.models.gpt.gpt_layer_specs import HAVE_APEX, HAVE_TE
from megatron.core.optimizer import Adam, distrib_optimizer
assert not (HAVE_TE or HAVE_APEX or find_spec("transformer_engine"))
print(Adam.__module__, distrib_optimizer.Adam.__module__)
"""


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
        ("self.fp8 = fp8 is not None", "self.fp8 = bool(fp8)"),
        ('init_process_group("nccl")', 'init_process_group("gloo")'),
        ("jit_fuser = torch.compile\n", "jit_fuser = noop_decorator\n"),
        ("    @torch.compile(dynamic=False)\n    def f():", "    \n    def f():"),
        ("f = torch.compile(g)", "f = g"),
        ("        share_storage = _get_share_storage()\n", "        pass\n"),
        ("if torch.cuda.is_available():", "if torch.cuda.is_available():"),
    ],
)
def test_rewrite(source, rewritten):
    assert rewrite(source) == rewritten


def test_megatron_chooses_torchs_classes_where_packages_for_gpus_are_installed(tmp_path):
    for name in ("transformer_engine", "apex"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} needs a GPU')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environ = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", CHOICES], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "torch.optim.adamw torch.optim.adam"
