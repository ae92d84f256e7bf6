"""What a process imports before ranks and engines are forked from it: megatron-core and vLLM take many seconds."""

import gc
import os

# As on the policy's ranks, and in vLLM's engines on CPUs.
os.environ["TORCH_COMPILE_DISABLE"] = "1"

from nemo_rl_lite.compat.imports import quick_imports

with quick_imports():
    from nemo_rl_lite.generation.vllm import worker as engine
    from nemo_rl_lite.policy import worker as policy

    policy.preload()
    engine.preload()

# A collection of garbage in a forked process would walk through all that was imported: half a second each.
gc.freeze()
