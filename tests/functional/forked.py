"""What a process imports before ranks are forked from it: megatron-core takes ten seconds."""

import os

# As on the policy's ranks.
os.environ["TORCH_COMPILE_DISABLE"] = "1"

from nemo_rl_lite.policy.megatron.worker import preload

preload()
