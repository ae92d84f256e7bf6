import pytest

from nemo_rl_lite.compat.megatron_cpu import rewrite


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
