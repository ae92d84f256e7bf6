"""Show the predicted memory of a run before anything is built."""

from collections.abc import Iterator
from pathlib import Path

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.host.devices import gpu_bytes
from nemo_rl_lite.host.memory import free_host_bytes
from nemo_rl_lite.models.shape import ModelShape, NoModelError, read_model_shape
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.metrics_log import MetricsLog
from nemo_rl_lite.offload.residency import Phase, Residency
from nemo_rl_lite.planning.automatic import settle
from nemo_rl_lite.planning.budget import ENGINE, Budget, budget, headers, render, size, title
from nemo_rl_lite.planning.memory import Bytes, predicted_metrics

NOTHING = Bytes()


def settled(config: Config, model_path: Path, console: RunConsole) -> Config:
    """The configuration with numbers in place of `auto`, and the reasons on the console."""
    shape = _shape(model_path, console)
    found = settle(config, shape, gpu_bytes() if on_gpus(config) else None)
    for reason in found.reasons:
        console.say(f"auto: {reason}")
    return found.config


def show_memory_plan(config: Config, model_path: Path, console: RunConsole, metrics: MetricsLog, step: int) -> None:
    """Print the residency table with predicted bytes, log them as `memory/predicted/...` at `step`, and warn about
    phases that may not fit."""
    shape = _shape(model_path, console)
    if shape is None:
        return
    residency = Residency.of(config)
    device_bytes = gpu_bytes() if on_gpus(config) else None
    unknown = on_gpus(config) and device_bytes is None
    # The KV cache is a share of the GPU. Without the GPU's size it is shown as 0 bytes.
    planned = budget(config, shape, 0 if unknown else device_bytes)
    console.table(title(config, shape, device_bytes), headers(residency), render(residency, planned.prediction))
    if unknown and residency.engines_share_device:
        console.say("nvidia-smi reports no GPU memory on this machine, so the KV cache is not predicted")
    metrics.log(step, predicted_metrics(planned.prediction))
    for warning in (*(() if unknown else _device_warnings(planned)), *_host_warnings(planned)):
        console.say(warning)


def _shape(model_path: Path, console: RunConsole) -> ModelShape | None:
    try:
        return read_model_shape(str(model_path))
    except NoModelError as error:
        console.say(f"memory is not predicted for this model: {error}")
        return None


def _device_warnings(planned: Budget) -> Iterator[str]:
    for phase, nbytes in planned.device.items():
        if planned.gpu_bytes is None or nbytes <= planned.gpu_bytes:
            continue
        engine = sum(planned.prediction.get((phase, part), NOTHING).device for part in ENGINE)
        if engine:
            advice = "offload=pinned or a smaller generation.vllm_cfg.gpu_memory_utilization helps"
        elif phase is Phase.TRAIN:
            advice = "smaller train micro-batches, activation_checkpointing or offload=cpu_optimizer helps"
        else:
            advice = "smaller logprob micro-batches or offload=logprob helps"
        other = size(planned.buffers[phase] + planned.overhead)
        yield (
            f"phase {phase.value} may not fit: {size(nbytes)} on a GPU of {size(planned.gpu_bytes)}, "
            f"of which {other} for the refit's buffers, contexts and captured graphs; {advice}; see nrl-lite plan"
        )


def _host_warnings(planned: Budget) -> Iterator[str]:
    """Compare the host memory of all ranks with this machine's: each rank alone checks only its own part."""
    free = free_host_bytes()
    if planned.host > free:
        yield (
            f"the {planned.ranks_per_host} policy rank(s) of a machine need {size(planned.host)} of host memory for "
            f"offloaded components and reference weights, and this machine has {size(free)} free"
        )
