"""Record traces of single steps of this process, with ranges named after the run's phases."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

Tool = Literal["torch", "nsys"]

# Traces are `profile/step-<step>/<worker>.json.gz`; the launcher's is `driver.json.gz`.
FOLDER, SUFFIX, DRIVER = "profile", ".json.gz", "driver"
_NOTHING = nullcontext()


class _Recording:
    """A recording. torch's profiler keeps the trace in memory until `end`; nsys records from outside."""

    def __init__(self, tool: Tool, on_device: bool):
        import torch

        self._has_device = on_device and torch.cuda.is_available()
        self._profiler: Any = None
        if not self._has_device:
            # Otherwise the profiler's library logs the missing device as an error.
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        if tool == "torch":
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._has_device:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
            self._profiler.start()
        elif self._has_device:
            torch.cuda.synchronize()
            runtime: Any = torch.cuda.cudart()
            runtime.cudaProfilerStart()

    def end(self, file: Path | None) -> None:
        import torch

        if self._has_device:
            torch.cuda.synchronize()
        if self._profiler is not None:
            self._profiler.stop()
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(file))
        elif self._has_device:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaProfilerStop()


_recording: _Recording | None = None


def begin(tool: Tool, on_device: bool = True) -> None:
    """Start recording. `on_device`: include the process' GPU."""
    global _recording
    end(None)
    _recording = _Recording(tool, on_device)


def end(file: Path | None) -> None:
    """Stop recording, if active, and write a Chrome trace to `file` (None: discard it), gzipped if the name ends in
    .gz."""
    global _recording
    recording, _recording = _recording, None
    if recording is not None:
        recording.end(file)


def span(name: str) -> AbstractContextManager[None]:
    """Mark a block as a named range in torch's trace and in NVTX while this process records."""
    return _NOTHING if _recording is None else _named(name)


@contextmanager
def _named(name: str) -> Iterator[None]:
    import torch

    # torch's CPU builds lack NVTX ranges.
    nvtx = torch.version.cuda is not None
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
