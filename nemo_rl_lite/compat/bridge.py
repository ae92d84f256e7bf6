"""megatron-bridge: its import, and the export of adapters alone."""

from collections.abc import Iterable, Sequence
from typing import Any

from nemo_rl_lite.compat.megatron_cpu import prepare_import
from nemo_rl_lite.compat.versions import written_for

written_for("megatron-bridge", "0.6", __name__)


def auto_bridge() -> Any:
    """Import megatron-bridge, on a CPU as well; return its class AutoBridge."""
    prepare_import()
    from megatron.bridge import AutoBridge

    return AutoBridge


def adapter_conversions(bridge: Any, chunks: Sequence[Any]) -> list[Any]:
    """Return the bridge's conversions of adapters, each with a task for A and one for B."""
    found = bridge._model_bridge.build_adapter_conversion_tasks(chunks)
    return [conversion for conversions in found.values() for conversion in conversions]


def export_adapters(bridge: Any, chunks: Sequence[Any], conversions: list[Any], on_cpu: bool) -> Iterable[Any]:
    """Export the adapters of these conversions, named as peft names them."""
    # The bridge takes no conversions here. This object is the call's own, so it is patched for this call alone.
    once = bridge._model_bridge
    once.build_adapter_conversion_tasks = lambda *_, **__: {"": conversions}
    return once.stream_adapter_weights_megatron_to_hf(chunks, cpu=on_cpu, show_progress=False)
