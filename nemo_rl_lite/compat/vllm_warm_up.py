"""Warm-up of vLLM's engines with the run's own requests, so that only their kernels are compiled.

vLLM compiles the sampling kernels of every kind of request, and the router kernels of four published models. All of
them also compile at their first use, so a request with other sampling waits only for its own.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from nemo_rl_lite.compat.versions import since, written_for

written_for(__name__, "vllm", "0.26", "0.31")

log = logging.getLogger(__name__)

# Environment variable from an engine's process to those of its ranks. In vLLM's configuration, the key of
# torch.compile's cache would depend on it.
_SAMPLING = "NRL_WARM_UP_SAMPLING"
# Values of `SamplingParams` with which a request keeps the whole distribution.
_UNFILTERED = {"top_p": 1, "top_k": 0}


def warm_up_with(sampling: Mapping[str, Any]) -> None:
    """Make the ranks of this process's engine warm up with these arguments of `SamplingParams`."""
    os.environ[_SAMPLING] = json.dumps(dict(sampling))


def warm_up_own_kernels() -> None:
    """Make vLLM's ranks in this process compile, at start, only kernels that their engine uses.

    What another release of vLLM lacks stays as it is there.
    """
    for change in (_sample_as_requests, _filter_as_requests, _route_as_the_model):
        try:
            change()
        except (ImportError, AttributeError) as error:
            log.info("vLLM compiles more kernels at start than this run needs: %s", error)


def _sample_as_requests() -> None:
    """Change the requests with which runner V2 warms up."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker import gpu_worker

    worker: Any = gpu_worker
    warm_up, replaced = worker.warmup_kernels, _replaceable(SamplingParams, "for_sampler_warmup")

    def warm_up_as_requests(model_runner: Any, execute_model: Callable[..., Any], sample: Callable[..., Any]) -> None:
        sampling = _own_sampling()
        if not sampling:
            return warm_up(model_runner, execute_model, sample)
        with replaced(staticmethod(lambda: SamplingParams(**sampling))):
            # None: without a grammar.
            return warm_up(model_runner, execute_model, lambda _: sample(None))

    worker.warmup_kernels = warm_up_as_requests


def _filter_as_requests() -> None:
    """Change the dummy batch with which runner V1 warms up, which has top p and top k."""
    from vllm.v1.worker import gpu_model_runner

    runner: Any = gpu_model_runner.GPUModelRunner
    warm_up, metadata = runner._dummy_sampler_run, gpu_model_runner.SamplingMetadata
    replaced = _replaceable(gpu_model_runner, "SamplingMetadata")

    def warm_up_as_requests(model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        sampling = _own_sampling()
        off: dict[str, Any] = {name: None for name, unused in _UNFILTERED.items() if sampling.get(name) == unused}
        with replaced(lambda **given: metadata(**given | off)):
            return warm_up(model_runner, *args, **kwargs)

    runner._dummy_sampler_run = warm_up_as_requests


def _route_as_the_model() -> None:
    """Compile the router kernels of four published models only for a model with such a router.

    From 0.31 on, vLLM compiles those of the engine's model alone.
    """
    if since("vllm", "0.31"):
        return
    from vllm.model_executor.warmup import kernel_warmup
    from vllm.v1.worker import gpu_worker

    worker: Any = gpu_worker
    warm_up, replaced = worker.kernel_warmup, _replaceable(kernel_warmup, "_warmup_ll_bf16_router_gemm")

    def warm_up_as_the_model(own: Any) -> None:
        routes = any(getattr(module, "allow_ll_bf16_gemm", False) for module in own.get_model().modules())
        with nullcontext() if routes else replaced(lambda: None):
            warm_up(own)

    worker.kernel_warmup = warm_up_as_the_model


def _own_sampling() -> dict[str, Any]:
    return json.loads(os.environ.get(_SAMPLING, "{}"))


def _replaceable(owner: Any, name: str) -> Callable[[Any], Any]:
    """Return a context manager that replaces an attribute during its block. Raises AttributeError: there is none."""
    getattr(owner, name)
    # As it is stored, which may be a static method.
    own = vars(owner)[name]

    @contextmanager
    def replaced(value: Any) -> Iterator[None]:
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, own)

    return replaced
