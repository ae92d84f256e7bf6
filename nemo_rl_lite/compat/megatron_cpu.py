"""Imports megatron.core and megatron.bridge where torch has no CUDA.

Their sources use CUDA in a few fixed ways that have exact CPU counterparts in torch. `prepare_import()` rewrites them
during import. It also hides packages whose classes need a GPU: both packages then choose torch's classes. torch itself
is not patched: that would silently break other libraries, such as transformers' rotary frequencies.
"""

import hashlib
import importlib
import importlib.machinery
import re
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType
from typing import Any

import torch

from nemo_rl_lite.compat.versions import written_for

written_for(__name__, "megatron-core", "0.19")

_PACKAGES = ("megatron.core.", "megatron.bridge.", "megatron.training.")

# Pattern -> replacement, applied in this order to the text of each module of _PACKAGES.
_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"""device\s*=\s*(["'])cuda(?::0)?\1""", r"device=\1cpu\1"),
        (r"""init_data\((["'])cuda\1\)""", r"init_data(\1cpu\1)"),
        # torch.cpu has these under the same names.
        (r"torch\.cuda\.(current_device|synchronize|current_stream|set_device|stream|Stream|Event)\b", r"torch.cpu.\1"),
        # The CPU's random state lives in torch itself.
        (r"torch\.cuda\.(get_rng_state|set_rng_state|manual_seed)\(", r"torch.\1("),
        (r"torch\.cuda\.random\.get_rng_state\(device=device\)", "torch.get_rng_state()"),
        (r"    _lazy_call\(cb\)", "    torch.set_rng_state(new_state)"),
        # The optimizers compare `param.type()` with these strings.
        (r"""(["'])torch\.cuda\.(\w*Tensor)\1""", r"\1torch.\2\1"),
        (r"torch\.cuda\.empty_cache\(\)", "None"),
        # A CPU stream records nothing; its events are always done.
        (r"self\.cuda_dtoh_stream\.record_event\(\)", "torch.cpu.Event()"),
        # Token counts of experts are converted to numpy after a copy to the host; here they are on the host already.
        (r"torch\.is_tensor\(tensor\) and tensor\.is_cuda", "torch.is_tensor(tensor)"),
        (r"tensor\.record_stream\(torch\.cpu\.current_stream\(\)\)", "None"),
        (r"\.cuda\(\)", ".cpu()"),
        (r"model_module\.cuda\(torch\.cpu\.current_device\(\)\)", "model_module.cpu()"),
        (r"""init_process_group\((["'])nccl\1""", r"init_process_group(\1gloo\1"),
        # gloo gathers and scatters only equal parts, and ranks that share experts have different numbers of tokens.
        (
            r"torch\.distributed\.all_gather\(output_tensor_list, input_, group=group\)",
            "[torch.distributed.broadcast(one.copy_(input_) if place == group.rank() else one, group=group, "
            "group_src=place) for place, one in enumerate(output_tensor_list)]",
        ),
        (
            r"torch\.distributed\.reduce_scatter\(output, input_tensor_list, group=group\)",
            "own = [one.clone() for one in input_tensor_list]; "
            "[torch.distributed.reduce(one, group=group, group_dst=place) for place, one in enumerate(own)]; "
            "output.copy_(own[rank])",
        ),
        # Local attention takes no widths of latent attention's keys and values. They only shape its output.
        (r"k_channels=self\.q_head_dim,\s*v_channels=self\.config\.v_head_dim,", ""),
        (r"context\.size\(\)\[:-2\] \+ \(self\.hidden_size_per_partition,\)", "(*context.size()[:-2], -1)"),
        # In checkpoints, the step count of torch's Adam is stored once for all parameters.
        (r"isinstance\(tensors\[key\], torch\.Tensor\)", "isinstance(tensors.get(key), torch.Tensor)"),
        # Recomputed norms would ask Transformer Engine for its FP8 state.
        (r"self\.fp8 = fp8 is not None", "self.fp8 = bool(fp8)"),
        # Outputs that were recomputed would be shared by an extension, which each machine compiles for half a minute.
        (r"share_storage = _get_share_storage\(\)", "pass"),
        (
            r"share_storage\(output, recomputation_output\)",
            "output.untyped_storage().resize_(recomputation_output.untyped_storage().size())"
            ".copy_(recomputation_output.untyped_storage())",
        ),
        # torch's compiler takes a second to import, without a gain.
        (r"jit_fuser = torch\.compile\b", "jit_fuser = noop_decorator"),
        (r"@torch\.compile\b(\(.*\))?\n", "\n"),
        (r"\btorch\.compile\((\w+)\)", r"\1"),
        # Without transformer_engine these names are None, which megatron-core counts as available.
        (r"\bHAVE_TE = all\(", "HAVE_TE = TEColumnParallelGroupedLinear is not None and all("),
    )
)

# Packages that both use wherever they can import them.
_NEED_GPU = ("transformer_engine", "apex")
# Modules of the bridge that import transformer_engine unconditionally.
_NEED_TRANSFORMER_ENGINE = ("megatron.bridge.peft.lora_layers", "megatron.bridge.peft.lora")


def prepare_import() -> None:
    """Make both packages importable; does nothing with CUDA or on a second call.

    Raises:
        RuntimeError: megatron.core is already imported.
    """
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if any(name.startswith(_PACKAGES) for name in sys.modules):
        raise RuntimeError("prepare_import() must come before the first import of megatron.core or megatron.bridge")
    sys.meta_path.insert(0, _Finder())
    _hide_packages()
    # These modules check for transformer_engine and must not find the placeholder.
    for name in ("models.gpt.gpt_layer_specs", "transformer.attention", "transformer.moe.router"):
        importlib.import_module(f"megatron.core.{name}")


def _hide_packages() -> None:
    """Make imports of packages that need a GPU fail as if they were not installed."""
    sys.modules.update(dict.fromkeys(_NEED_GPU))  # pyrefly: ignore


def rewrite(source: str) -> str:
    """Return the CPU counterpart of a module's source text."""
    for pattern, replacement in _RULES:
        source = pattern.sub(replacement, source)
    return source


def _own(path: str) -> str:
    """Return the path of a rewritten module's bytecode, next to the normal .pyc."""
    return f"{path.removesuffix('.pyc')}.on-cpu-{_digest(_RULES)}.pyc" if path.endswith(".pyc") else path


@cache
def _digest(rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    """Return a digest of the rules, for the names of bytecode files."""
    return hashlib.sha256(repr([(rule.pattern, new) for rule, new in rules]).encode()).hexdigest()[:12]


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any) -> CodeType:  # pyrefly: ignore
        is_rewritten = any(word in data for word in (b"cuda", b"nccl", b"torch.compile", b"k_channels"))
        return super().source_to_code(rewrite(data.decode()) if is_rewritten else data, path)

    def get_data(self, path: str) -> bytes:
        return super().get_data(_own(path))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(_own(path), data, _mode=_mode)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in _NEED_TRANSFORMER_ENGINE:
            with _transformer_engine_placeholder():
                super().exec_module(module)
        else:
            super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _RewritingLoader(spec.loader.name, spec.loader.path)
        return spec


@contextmanager
def _transformer_engine_placeholder() -> Iterator[None]:
    """Provide empty classes under transformer_engine's names during the block."""
    package, pytorch, ops = (
        types.ModuleType(name)
        for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
    )
    for name in ("Linear", "LayerNormLinear", "GroupedLinear"):
        setattr(pytorch, name, type(name, (torch.nn.Module,), {}))
    vars(ops)["Sequential"] = type("Sequential", (torch.nn.Module,), {})
    vars(pytorch)["ops"] = ops
    vars(package).update(pytorch=pytorch, __version__="0.0.0")
    modules = {module.__name__: module for module in (package, pytorch, ops)}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        _hide_packages()
