"""What is imported of megatron-bridge, each in a process of its own."""

import json
import subprocess
import sys

import pytest

COUNT = "print(json.dumps(sorted(name for name in sys.modules if name.count('.') == 3 and name.startswith(FAMILIES))))"
CODE = f"""
import json, sys
FAMILIES = "megatron.bridge.models."
from nemo_rl_lite.policy.megatron.bridges import import_bridge, import_family
bridge = import_bridge()
import_family(sys.argv[1:])
print(json.dumps(bridge.list_supported_models()))
{COUNT}
"""


def after_import(*architectures: str) -> tuple[list[str], list[str]]:
    """The architectures that the bridge knows then, and the packages of models that are imported."""
    done = subprocess.run([sys.executable, "-c", CODE, *architectures], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    known, families = done.stdout.splitlines()[-2:]
    return json.loads(known), json.loads(families)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_model_comes_with_its_own_family(architecture):
    known, families = after_import(architecture)
    assert architecture in known and len(known) < 10
    assert not {"megatron.bridge.models.bailing", "megatron.bridge.models.nemotron_vl"} & set(families)


def test_an_architecture_that_no_family_names_gets_all_of_them():
    known, families = after_import("NobodysForCausalLM")
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM", "GemmaForCausalLM"} <= set(known)
    assert {"megatron.bridge.models.bailing", "megatron.bridge.models.nemotron_vl"} <= set(families)
