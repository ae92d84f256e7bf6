"""What will be where, and how large, shown before anything is built."""

from pathlib import Path

from nemo_rl_lite.cluster.devices import gpu_bytes
from nemo_rl_lite.config.model_shape import read_model_shape
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.sinks import MetricsLog
from nemo_rl_lite.offload.memory_table import headers, render, size, title
from nemo_rl_lite.offload.prediction import predict, predicted_metrics, totals
from nemo_rl_lite.offload.residency import Residency

# What CUDA, NCCL, captured graphs and the refit's buffer took beside the components on an H100 (docs/gpus.md).
OVERHEAD = 6 * 2**30
ADVICE = "offload=pinned, a smaller generation.vllm_cfg.gpu_memory_utilization or smaller micro-batches help"


def show_memory_plan(config: Config, model_path: Path, console: RunConsole, metrics: MetricsLog) -> None:
    """Print the residency table with predicted bytes, and log these as `memory/predicted/...` at step 0."""
    shape, residency = read_model_shape(str(model_path)), Residency.of(config)
    device_bytes = gpu_bytes() if on_gpus(config) else None
    unknown = on_gpus(config) and residency.engines_share_device and device_bytes is None
    if shape is None or unknown:
        console.say("no GPU on this machine tells its size (nvidia-smi), so no memory is predicted")
        return
    prediction = predict(config, shape, device_bytes)
    console.table(title(config, shape, device_bytes), headers(residency), render(residency, prediction))
    metrics.log(0, predicted_metrics(prediction))
    for phase, nbytes in totals(prediction).items():
        if device_bytes is not None and nbytes.device + OVERHEAD > device_bytes:
            console.say(
                f"phase {phase.value} will hardly fit: {size(nbytes.device)} of a GPU of {size(device_bytes)}, and "
                f"contexts and captured graphs take some {size(OVERHEAD)}. {ADVICE}"
            )
