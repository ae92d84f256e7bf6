"""Import megatron-core, which takes many seconds, in the process from which ranks on CPUs are forked (see
`whole_runs.processes`)."""

import os

# As on the policy's ranks on CPUs.
os.environ["TORCH_COMPILE_DISABLE"] = "1"

from nemo_rl_lite.policy import worker

worker.preload()
