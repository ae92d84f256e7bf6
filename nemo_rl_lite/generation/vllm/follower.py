"""The ranks of an engine on a host other than its first."""

from functools import partial

from nemo_rl_lite.config.engines import EngineHost
from nemo_rl_lite.config.schema import GenerationConfig, PolicyConfig
from nemo_rl_lite.generation.vllm.arguments import engine_arguments, engine_config
from nemo_rl_lite.generation.vllm.worker import preload
from nemo_rl_lite.system.peers import end_process, end_with_first

__all__ = ["VLLMFollower", "preload"]


class VLLMFollower:
    """Starts vLLM's rank processes of this host, which serve the engine core on the engine's first host.

    vLLM's multiprocessing executor connects both, as in `vllm serve --headless`. This process only waits. It ends when
    a rank or the first host ends.
    """

    def __init__(
        self,
        generation: GenerationConfig,
        policy: PolicyConfig,
        model_path: str,
        seed: int,
        on_gpu: bool,
        host: EngineHost,
    ):
        from vllm.v1.executor import Executor

        end_with_first(host.addresses[host.index][1])
        arguments = engine_arguments(generation, policy, model_path, seed, on_gpu, host)
        config = engine_config(arguments, generation, headless=True)
        self._executor = Executor.get_class(config)(config)
        self._executor.register_failure_callback(partial(end_process, "a rank of this host has ended"))
