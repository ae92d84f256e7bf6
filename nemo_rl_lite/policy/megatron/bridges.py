"""megatron-bridge with the family of a run's model alone. The package itself imports all families and what they
need."""

import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_lite.host.lazy_package import import_all, import_lazily, modules_with
from nemo_rl_lite.policy.megatron.cpu_shim import prepare_import

_FAMILIES = "megatron.bridge.models"


def import_bridge() -> Any:
    """Import megatron-bridge without its families; return its class AutoBridge."""
    prepare_import()
    import_lazily("megatron.bridge")
    import_lazily(_FAMILIES)
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    return AutoBridge


def bridge_of(path: Path) -> Any:
    """Return the bridge to the Hugging Face model in a folder. Raises what AutoBridge does for one that it lacks."""
    bridge = import_bridge()
    import_family(json.loads((path / "config.json").read_text()).get("architectures") or ())
    return bridge.from_hf_pretrained(str(path))


def import_family(architectures: Sequence[str]) -> None:
    """Import the families that say that they are for one of the architectures, or all where none does."""
    names = "|".join(map(re.escape, architectures))
    # A family registers a class of transformers, or its name.
    found = modules_with(_FAMILIES, rf"source=[\"']?({names})\b") if names else []
    for module in found:
        importlib.import_module(module)
    if not found:
        import_all("megatron.bridge.diffusion.models")
        import_all(_FAMILIES)
