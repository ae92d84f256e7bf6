"""Serves a trained model without training: finds a run's or a folder's model, and starts an engine in this process."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from nemo_rl_lite.checkpoint.resume import locate
from nemo_rl_lite.compat.imports import quick_imports
from nemo_rl_lite.config.composition import compose_files
from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.names import in_our_names
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.errors import CheckpointError, ConfigError, LauncherError, UsageError, WorkerError
from nemo_rl_lite.generation.interface import Engine, Sampling
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.generation.transformers import LocalReplica
from nemo_rl_lite.models.folder import check_model_folder, from_hub
from nemo_rl_lite.models.shape import NoModelError, is_hub_name
from nemo_rl_lite.observability.environment import CONFIG_FILE
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.run.folder import is_run
from nemo_rl_lite.run.model import chat_tokenizer, with_chat_keys
from nemo_rl_lite.serving.public import ResponderConfig
from nemo_rl_lite.system.machine import ON_CPUS, gpu_bytes
from nemo_rl_lite.validation.compose import restore

# For a folder that does not say: the most tokens of a chat, for which memory is taken, and of a response.
_CHAT_TOKENS, _NEW_TOKENS = 8192, 512
_ON_GPU = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=vllm_gpu"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class SampledBy:
    """Flags of a command that set how responses are sampled. None: not given."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def applied(self, usual: Sampling) -> Sampling:
        """Return the sampling with these flags."""
        return replace(usual, **{name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True)
class Served:
    """A model that answers: its name, its Hugging Face folder, and the configuration of its engine."""

    name: str
    folder: Path
    config: Config
    of_run: bool = True
    """False: no run has said what the model is for."""
    step: int = 0
    """The step that made the weights; 0 for a model that no run has trained."""
    other_names: tuple[str, ...] = ()
    """Names besides the folder's that requests may use."""
    flags: SampledBy = SampledBy()

    def __str__(self) -> str:
        where = "GPUs" if on_gpus(self.config) else "CPUs"
        return f"{self.name} ({self.folder}) with {self.config.generation.backend} on {where}"


def find_served(
    path: Path, overrides: Sequence[str], flags: SampledBy, say: Say, usual_tokens: int | None = None
) -> Served:
    """Find a model by `find_model`, and give it the limits of its context. `usual_tokens`: most tokens of a response
    where `flags` have none (None: all that fit); `overrides` set `CHAT_KEYS`.

    Raises:
        ConfigError: an override cannot be, or sets another key.
        LauncherError: the model's engine cannot run here, or a flag is out of range.
        CheckpointError: see `find_model`.
    """
    for told in in_our_names(overrides)[1]:
        say(f"note: {told}")
    served = find_model(path, say)
    config = alone(with_chat_keys(served.config, overrides))
    longest = _context(served.folder)
    _check(flags, longest, engine_of(config).temperatures)
    policy = replace(config.policy, max_total_sequence_length=longest)
    # vLLM takes less than the model's context where the GPU's memory holds no more.
    fits = {"max_model_len": -1} if on_gpus(config) and engine_of(config).takes_share else {}
    generation = replace(
        config.generation,
        max_new_tokens=min(usual_tokens or longest, longest - 1),
        serve=replace(config.generation.serve, enabled=True),
        vllm_kwargs={**fits, **config.generation.vllm_kwargs},
    )
    names = dict.fromkeys((*served.other_names, str(path)))
    config = replace(config, policy=policy, generation=generation)
    return replace(served, config=config, other_names=tuple(names), flags=flags)


def _check(flags: SampledBy, longest: int, temperatures: tuple[float, float]) -> None:
    """Raise UsageError where a flag is out of range."""
    lowest, highest = temperatures
    tokens, heat, top_p, top_k = flags.max_new_tokens, flags.temperature, flags.top_p, flags.top_k
    if tokens is not None and not 0 < tokens < longest:
        raise UsageError(f"--max-new-tokens {tokens}: a chat and its response have {longest} tokens together")
    if heat and not lowest <= heat <= highest:
        raise UsageError(f"--temperature {heat:g}: this engine takes 0 and {lowest:g} to {highest:g}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"--top-p {top_p:g} is not above 0 and at most 1")
    if top_k is not None and top_k < 1:
        raise UsageError(f"--top-k {top_k} is not at least 1")


def _context(folder: Path) -> int:
    """Return the most tokens of a chat: the model's positions. On CPUs no more than `_CHAT_TOKENS`, because there an
    engine takes memory for the longest prompt."""
    described = json.loads((folder / "config.json").read_text())
    positions = described.get("max_position_embeddings") or _CHAT_TOKENS
    return positions if gpu_bytes() else min(positions, _CHAT_TOKENS)


def find_model(path: Path, say: Say) -> Served:
    """Find a model and its configuration, from a run, a Hugging Face folder or the hub. A run's model is its exported
    `hf/`, or else its newest checkpoint, which is exported now.

    Raises:
        CheckpointError: there is no such model, or its run is of another version of this package.
        LauncherError: the model's engine cannot run here.
    """
    # A missing folder next to others is a folder that was misspelt.
    if is_hub_name(name := str(path)) and not path.parent.is_dir():
        say(f"fetching {name} from the hub, where this machine does not have it")
        try:
            return replace(_of_folder(from_hub(name)), name=path.name)
        except NoModelError as error:
            raise CheckpointError(f"{name} {error}; {error.fix}") from None
    path = path.expanduser().resolve()
    return _of_run(path, say) if is_run(path) else _of_folder(path)


def alone(config: Config) -> Config:
    """The configuration of an engine that is alone on its device. It loads all weights, as no refit follows."""
    generation = replace(
        config.generation,
        colocated=replace(config.generation.colocated, enabled=False),
        vllm_cfg=replace(config.generation.vllm_cfg, lora="merged"),
        vllm_kwargs={"load_format": "auto", "use_tqdm_on_load": False, **config.generation.vllm_kwargs},
    )
    return replace(config, generation=generation)


def start_engine(served: Served) -> tuple[RequestQueue, ResponderConfig]:
    """Start the engine in this process; return its queue and what answers need.

    Raises:
        ConfigError: the folder's tokenizer or chat template cannot be used.
    """
    config, on_gpu = served.config, on_gpus(served.config)
    engine = engine_of(config)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
    # It warns of a machine without CUDA.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.update(engine.environment(config.generation, on_gpu) | quiet | ({} if on_gpu else ON_CPUS))
    with quick_imports():
        worker = imported(engine.worker)
        tokenizer = chat_tokenizer(served.folder, config)

    def make() -> Engine:
        made = worker(config.generation, config.policy, str(served.folder), config.algorithm.seed, on_gpu)
        made.version = served.step
        return made

    replica = LocalReplica(make)
    queue = RequestQueue([replica], config.generation.vllm_cfg.max_num_seqs, _lost, lambda: None)
    sampling = served.flags.applied(Sampling.of(config.generation, tokenizer.end_tokens))
    return queue, ResponderConfig(tokenizer, sampling, replica.engine.max_length, engine.temperatures)


def _lost(replica: int, error: WorkerError) -> None:
    """Raise the error: nothing can replace an engine of this process."""
    raise error


def _of_run(run: Path, say: Say) -> Served:
    try:
        config = restore((run / CONFIG_FILE).read_text())
    except ConfigError:
        fix = f"nrl-lite export {run} of that version writes a folder that can be named in its place"
        raise CheckpointError(f"{run} is a run of another version of the launcher; {fix}") from None
    if on_gpus(config) and gpu_bytes() is None:
        fix = "name its exported folder to run it on CPUs (nrl-lite export writes one)"
        raise LauncherError(f"{run} generated on GPUs, and this machine has none: {fix}")
    # What is exported has the template that the run chose.
    own = replace(config.policy.tokenizer, chat_template=None)
    config = replace(config, policy=replace(config.policy, tokenizer=own))
    folder, step = _exported(run, say)
    return Served(run.name, folder, config, step=step, other_names=(config.run_name,))


def _exported(run: Path, say: Say) -> tuple[Path, int]:
    """Return the run's exported model, and the step that made it."""
    if (run / "hf").is_dir():
        return run / "hf", _last_step(run / METRICS_FILE)
    found = locate(run)
    if found is None:
        fix = "checkpoint.export_hf_at_end=true or checkpoint.save_period=10 in its command would write them"
        raise CheckpointError(f"{run} has neither hf/ nor a complete checkpoint: {fix}")
    folder = run / f"hf-{found.path.name}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "nemo_rl_lite.export", str(run), str(folder)]
        say(f"exporting the checkpoint of step {found.step} to {folder}")
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            why = next(reversed(done.stderr.strip().splitlines()), f"status {done.returncode}")
            raise CheckpointError(f"nrl-lite export {run} {folder}: {why}")
    return folder, found.step


def _last_step(metrics: Path) -> int:
    """Return the last step that a run has logged; 0 where it has logged none."""
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return max((json.loads(line)["step"] for line in lines[-1:]), default=0)


def _of_folder(folder: Path) -> Served:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; name a run's folder, a Hugging Face folder or a Hub model ID")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is neither a run's folder nor a Hugging Face model's: it has no config.json")
    try:
        check_model_folder(folder)
    except NoModelError as error:
        raise CheckpointError(f"{folder} is no whole Hugging Face model: {error}") from None
    described = json.loads((folder / "config.json").read_text())
    longest = min(described.get("max_position_embeddings") or _CHAT_TOKENS, _CHAT_TOKENS)
    # Nothing trains, so the rules about training do not matter.
    defaults = OmegaConf.to_container(compose_files(_ON_GPU if gpu_bytes() else []), resolve=True)
    config = restore(json.dumps(defaults))
    installed = importlib.util.find_spec(engine_of(config).package) is not None
    backend = config.generation.backend if installed else "transformers"
    precision = "float32" if described.get("dtype", described.get("torch_dtype")) == "float32" else "bfloat16"
    config = replace(
        config,
        policy=replace(config.policy, precision=precision, max_total_sequence_length=longest),
        generation=replace(config.generation, backend=backend, max_new_tokens=min(_NEW_TOKENS, longest // 2)),
    )
    # A run's exported model has the run's name.
    name = folder.parent.name if folder.name == "hf" else folder.name
    return Served(name, folder, config, of_run=False)
