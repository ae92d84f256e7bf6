"""What will be where, and how large, shown before anything is built."""

from collections.abc import Iterator
from pathlib import Path

from nemo_rl_lite.cluster.devices import gpu_bytes
from nemo_rl_lite.config.model_shape import ModelShape, NoModelError, read_model_shape
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus, policy_ranks
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.sinks import MetricsLog
from nemo_rl_lite.offload.host_memory import free_host_bytes
from nemo_rl_lite.offload.memory_table import headers, render, size, title
from nemo_rl_lite.offload.prediction import Bytes, Prediction, predict, predicted_metrics, totals
from nemo_rl_lite.offload.residency import Component, Phase, Residency

# What CUDA, NCCL, captured graphs and the refit's buffer took beside the components on GPUs: 6 to 8 GiB (docs/gpus.md).
OVERHEAD = 7 * 2**30
ENGINE = (Component.GENERATION_WEIGHTS, Component.KV_CACHE)
NOTHING = Bytes()


def show_memory_plan(config: Config, model_path: Path, console: RunConsole, metrics: MetricsLog, step: int) -> None:
    """Print the residency table with predicted bytes, log these as `memory/predicted/...` at `step`, and say what will
    hardly fit."""
    shape = _shape(model_path, console)
    if shape is None:
        return
    residency = Residency.of(config)
    device_bytes = gpu_bytes() if on_gpus(config) else None
    unknown = on_gpus(config) and device_bytes is None
    # Without a size the KV cache, a share of it, is shown as nothing.
    prediction = predict(config, shape, 0 if unknown else device_bytes)
    console.table(title(config, shape, device_bytes), headers(residency), render(residency, prediction))
    if unknown and residency.engines_share_device:
        console.say("nvidia-smi tells no GPU's size on this machine, so the KV cache is not predicted")
    metrics.log(step, predicted_metrics(prediction))
    for warning in (*_device_warnings(config, prediction, device_bytes), *_host_warnings(config, prediction)):
        console.say(warning)


def _shape(model_path: Path, console: RunConsole) -> ModelShape | None:
    try:
        return read_model_shape(str(model_path))
    except NoModelError as error:
        console.say(f"memory is not predicted for this model: {error}")
        return None


def _device_warnings(config: Config, prediction: Prediction, device_bytes: int | None) -> Iterator[str]:
    for phase, nbytes in totals(prediction).items():
        if device_bytes is None or nbytes.device + OVERHEAD <= device_bytes:
            continue
        engine = sum(prediction.get((phase, part), NOTHING).device for part in ENGINE)
        if engine:
            advice = "offload=pinned or a smaller generation.vllm_cfg.gpu_memory_utilization helps"
        elif phase is Phase.TRAIN:
            advice = "smaller train micro-batches, activation_checkpointing or offload=cpu_optimizer helps"
        else:
            advice = "smaller logprob micro-batches or offload=logprob helps"
        yield (
            f"phase {phase.value} will hardly fit: {size(nbytes.device)} of a GPU of {size(device_bytes)}, and "
            f"contexts and captured graphs take some {size(OVERHEAD)}; {advice}"
        )


def _host_warnings(config: Config, prediction: Prediction) -> Iterator[str]:
    """Of host memory, by this machine's: ranks check for themselves when they take it, but one after the other."""
    ranks = min(policy_ranks(config), config.cluster.gpus_per_node or policy_ranks(config))
    needed, free = ranks * max(nbytes.host for nbytes in totals(prediction).values()), free_host_bytes()
    if needed > free:
        yield (
            f"the {ranks} policy rank(s) of a machine will want {size(needed)} of host memory for what leaves their "
            f"devices, and {size(free)} are free on this one"
        )
