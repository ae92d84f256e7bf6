"""What makes a vLLM engine start sooner, and where the seconds of its start go."""

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from nemo_rl_lite.observability.timer import SETUP

# What vLLM logs at the end of a part of its start, and the part's name.
_ENDS = {
    "Model loading took": "model",
    "Available KV cache memory": "profiling",
    "Graph capturing finished": "cuda_graphs",
}
_REST = "warm_up"
# vLLM's configuration imports a class from here to annotate an argument, and with it the package openai (560 modules).
_TOOL_SERVER = "vllm.entrypoints.mcp.tool_server"
# Options of vLLM with which the sizes of its graphs follow rules of their own.
_OWN_RULES = ("performance_mode", "speculative_config")


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes for which an engine captures CUDA graphs; a batch is padded to the next one. vLLM's own
    list has every eighth number up to 256. Decoding reads the weights and the cache, so padding costs little, and each
    graph costs time at the start."""
    steps = [1, 2, 4, 8, 16, *range(32, 256, 32), *range(256, 512, 64), *range(512, max_num_seqs, 128)]
    return [size for size in steps if size < max_num_seqs] + [max_num_seqs]


def with_graph_sizes(options: Mapping[str, Any], max_num_seqs: int) -> dict[str, Any]:
    """Return the options of an engine with `graph_sizes`, unless they decide themselves what is captured."""
    compilation = options.get("compilation_config") or {}
    decides = not isinstance(compilation, Mapping) or any("cudagraph_capture_size" in name for name in compilation)
    if decides or any(name in options for name in _OWN_RULES):
        return dict(options)
    sizes = {"cudagraph_capture_sizes": graph_sizes(max_num_seqs)}
    return {**options, "compilation_config": {**compilation, **sizes}}


@contextmanager
def timed_parts() -> Iterator[None]:
    """Time in `SETUP` the parts of an engine's start in this process, which vLLM tells by what it logs."""
    parts, logger = _Parts(), logging.getLogger("vllm")
    logger.addHandler(parts)
    try:
        yield
    finally:
        logger.removeHandler(parts)
        parts.end(_REST)


class _Parts(logging.Handler):
    """Ends a part of the start at each of the messages of `_ENDS`."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        part = next((part for text, part in _ENDS.items() if str(record.msg).startswith(text)), None)
        if part is not None:
            self.end(part)

    def end(self, part: str) -> None:
        now = time.perf_counter()
        SETUP.add(part, now - self._began)
        self._began = now


@contextmanager
def without_tool_servers() -> Iterator[None]:
    """Within the block, which imports vLLM, an empty class stands for its tool servers. No engine here has one."""
    if _TOOL_SERVER in sys.modules:
        yield
        return
    placeholder = sys.modules[_TOOL_SERVER] = ModuleType(_TOOL_SERVER)
    vars(placeholder)["ToolServer"] = type("ToolServer", (), {})
    try:
        yield
    finally:
        del sys.modules[_TOOL_SERVER]


def open_device() -> None:
    """Open this process's GPU in a thread, while the process imports. Does nothing where it sees none, or several: the
    engine then runs in processes of its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and "," not in visible:
        threading.Thread(target=_open_device, name="open-device", daemon=True).start()


def _open_device() -> None:
    """Retain the primary context of the first GPU, which CUDA's runtime and so torch will use. An error will come again
    where the engine uses the device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    context = ctypes.c_void_p()
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
