"""Finds a model in a run, a folder or on the Hub, and starts an engine for it in this process."""

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rl_lite.checkpoint.resume import locate
from nemo_rl_lite.compat.imports import quick_imports
from nemo_rl_lite.config.composition import compose_files
from nemo_rl_lite.config.engines import engine_of, has_build
from nemo_rl_lite.config.names import in_our_names
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.errors import CheckpointError, ConfigError, LauncherError, UsageError, WorkerError
from nemo_rl_lite.generation.interface import Engine, Sampling
from nemo_rl_lite.generation.loop import LocalReplica
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.models.folder import check_model_folder, from_hub
from nemo_rl_lite.models.shape import NoModelError, is_hub_name
from nemo_rl_lite.observability.environment import CONFIG_FILE
from nemo_rl_lite.observability.runs import NoRunError, find_run, is_run
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.run.model import CHAT_KEYS, chat_tokenizer, with_chat_keys
from nemo_rl_lite.serving.public import ResponderConfig, all_or, out_of_range
from nemo_rl_lite.system.machine import ON_CPUS, gpu_bytes
from nemo_rl_lite.validation.compose import restore

# Maximum tokens of a chat on CPUs and of a folder without a limit; of a response of a folder.
_CHAT_TOKENS, _NEW_TOKENS = 8192, 512
_ON_GPU = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=vllm_gpu"]
Say = Callable[[str], None]
_MODELS = "a run (its folder, its name or last), a Hugging Face folder or a Hub model ID"


@dataclass(frozen=True)
class SampledBy:
    """Sampling flags of a command; None if not given."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    @classmethod
    def of(cls, given: argparse.Namespace) -> "SampledBy":
        return cls(**{one.name: getattr(given, one.name) for one in fields(cls)})

    def applied(self, usual: Sampling) -> Sampling:
        given: dict[str, Any] = {name: value for name, value in asdict(self).items() if value is not None}
        if self.top_k is not None:
            given["top_k"] = all_or(self.top_k)
        return replace(usual, **given)


@dataclass(frozen=True)
class Served:
    """A model to serve: its name, its Hugging Face folder and the configuration of its engine."""

    name: str
    folder: Path
    config: Config
    of_run: bool = True
    """True for a run's model, whose configuration is known."""
    step: int = 0
    """Training step of the weights; 0 if no run has trained the model."""
    other_names: tuple[str, ...] = ()
    """Further names that requests may use."""
    flags: SampledBy = SampledBy()

    def __str__(self) -> str:
        where = "GPUs" if on_gpus(self.config) else "CPUs"
        return f"{self.name} ({self.folder}) with {self.config.generation.backend} on {where}"


def model_parser(command: str, description: str | None, tokens: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that `find_served` reads. `tokens`: default of --max-new-tokens."""
    parser = argparse.ArgumentParser(
        prog=command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help=_MODELS)
    parser.add_argument("overrides", nargs="*", help=f"{' and '.join(CHAT_KEYS)}, as for train")
    most = f"maximum tokens per response (default: {tokens})"
    parser.add_argument("--max-new-tokens", metavar="N", type=int, help=most)
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy (default: the run's)")
    parser.add_argument("--top-p", metavar="P", type=float, help="as generation.top_p (default: the run's)")
    parser.add_argument("--top-k", metavar="K", type=int, help="as generation.top_k (default: the run's)")
    return parser


def find_served(given: argparse.Namespace, say: Say, usual_tokens: int | None = None) -> Served:
    """Find the model of a command line (see `model_parser`, `find_model`) and apply the limits of its context.

    `usual_tokens`: maximum tokens per response without a flag; None for all that fit.

    Raises:
        ConfigError: an override is invalid.
        LauncherError: the engine cannot run here, or a flag is out of range.
        CheckpointError: see `find_model`.
    """
    for told in in_our_names(given.overrides)[1]:
        say(f"note: {told}")
    served, flags = find_model(given.run, say), SampledBy.of(given)
    config = alone(with_chat_keys(served.config, given.overrides))
    longest = _context(served.folder)
    if flags.max_new_tokens is not None and not 0 < flags.max_new_tokens < longest:
        rule = f"must be above 0 and below the context of {longest} tokens"
        raise UsageError(f"--max-new-tokens {flags.max_new_tokens}: {rule}")
    if found := out_of_range(engine_of(config), flags.temperature, flags.top_p, flags.top_k):
        raise UsageError(f"--{found[0].replace('_', '-')} {found[1]}")
    policy = replace(config.policy, max_total_sequence_length=longest)
    # vLLM shortens the context to the tokens that the GPU's memory holds.
    fits = {"max_model_len": -1} if on_gpus(config) and engine_of(config).takes_share else {}
    generation = replace(
        config.generation,
        max_new_tokens=min(usual_tokens or longest, longest - 1),
        serve=replace(config.generation.serve, enabled=True),
        vllm_kwargs={**fits, **config.generation.vllm_kwargs},
    )
    names = dict.fromkeys((*served.other_names, str(given.run)))
    config = replace(config, policy=policy, generation=generation)
    return replace(served, config=config, other_names=tuple(names), flags=flags)


def _context(folder: Path) -> int:
    """Return the model's context length; on CPUs at most `_CHAT_TOKENS`, as an engine reserves memory for it."""
    described = json.loads((folder / "config.json").read_text())
    positions = described.get("max_position_embeddings") or _CHAT_TOKENS
    return positions if gpu_bytes() else min(positions, _CHAT_TOKENS)


def find_model(path: Path, say: Say) -> Served:
    """Find a model and its configuration: of a run (see `find_run`), a Hugging Face folder or the Hub. A run's model is
    its `hf/`, or otherwise its newest checkpoint, which is exported now.

    Raises:
        CheckpointError: no such model, or its run is of another version of this package.
        LauncherError: the model's engine cannot run here.
    """
    folder = path.expanduser()
    if not (folder / CONFIG_FILE).is_file():
        with suppress(NoRunError):
            folder = find_run(str(path))
    # A missing folder next to others is a misspelt folder.
    if not folder.is_dir() and is_hub_name(name := str(path)) and not path.parent.is_dir():
        say(f"fetching {name} from the Hub, unless this machine has it")
        try:
            return replace(_of_folder(from_hub(name)), name=path.name)
        except NoModelError as error:
            raise CheckpointError(f"{name} {error}; {error.fix}") from None
    folder = folder.resolve()
    return _of_run(folder, say) if is_run(folder) else _of_folder(folder)


def alone(config: Config) -> Config:
    """Return the configuration of an engine that has a device to itself, and loads its weights without a refit."""
    generation = replace(
        config.generation,
        colocated=replace(config.generation.colocated, enabled=False),
        vllm_cfg=replace(config.generation.vllm_cfg, lora="merged"),
        vllm_kwargs={"load_format": "auto", "use_tqdm_on_load": False, **config.generation.vllm_kwargs},
    )
    return replace(config, generation=generation)


def start_engine(served: Served) -> tuple[RequestQueue, ResponderConfig]:
    """Start the engine in this process; return its queue and the responder's configuration.

    Raises:
        ConfigError: the folder's tokenizer or chat template cannot be used.
    """
    config, on_gpu = served.config, on_gpus(served.config)
    engine = engine_of(config)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
    # Hide its warning about missing CUDA.
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
    return queue, ResponderConfig(tokenizer, sampling, replica.loop.engine.max_length, engine)


def _lost(replica: int, error: WorkerError) -> None:
    raise error


def _of_run(run: Path, say: Say) -> Served:
    try:
        config = restore((run / CONFIG_FILE).read_text())
    except ConfigError:
        fix = f"export it with that version (nrl-lite export {run}), and name the exported folder"
        raise CheckpointError(f"{run} is a run of another version of the launcher; {fix}") from None
    if on_gpus(config) and gpu_bytes() is None:
        fix = "to run it on CPUs, name its exported folder (nrl-lite export)"
        raise LauncherError(f"{run} generated on GPUs, and this machine has none: {fix}")
    # The exported model has the run's template.
    own = replace(config.policy.tokenizer, chat_template=None)
    config = replace(config, policy=replace(config.policy, tokenizer=own))
    if config.generation.speculation == "mtp":
        # An export has no layers for multi-token prediction.
        config = replace(config, generation=replace(config.generation, speculation=None))
    folder, step = _exported(run, say)
    return Served(run.name, folder, config, step=step, other_names=(config.run_name,))


def _exported(run: Path, say: Say) -> tuple[Path, int]:
    """Return the run's exported model and its step."""
    if (run / "hf").is_dir():
        return run / "hf", _last_step(run / METRICS_FILE)
    found = locate(run)
    if found is None:
        fix = "set checkpoint.export_hf_at_end=true or checkpoint.save_period=10 in its command"
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
    """Return the last logged step of a run, or 0."""
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return max((json.loads(line)["step"] for line in lines[-1:]), default=0)


def _of_folder(folder: Path) -> Served:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; name {_MODELS} (nrl-lite runs lists runs)")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is neither a run's folder nor a Hugging Face model's: it has no config.json")
    try:
        check_model_folder(folder)
    except NoModelError as error:
        raise CheckpointError(f"{folder} is not a complete Hugging Face model: {error}") from None
    described = json.loads((folder / "config.json").read_text())
    longest = min(described.get("max_position_embeddings") or _CHAT_TOKENS, _CHAT_TOKENS)
    # Skip the rules about training.
    defaults = OmegaConf.to_container(compose_files(_ON_GPU if gpu_bytes() else []), resolve=True)
    config = restore(json.dumps(defaults))
    engine = engine_of(config)
    is_usable = importlib.util.find_spec(engine.package) is not None and has_build(engine, on_gpus(config))
    backend = config.generation.backend if is_usable else "transformers"
    precision = "float32" if described.get("dtype", described.get("torch_dtype")) == "float32" else "bfloat16"
    config = replace(
        config,
        policy=replace(config.policy, precision=precision, max_total_sequence_length=longest),
        generation=replace(config.generation, backend=backend, max_new_tokens=min(_NEW_TOKENS, longest // 2)),
    )
    # A run's exported model has the run's name.
    name = folder.parent.name if folder.name == "hf" else folder.name
    return Served(name, folder, config, of_run=False)
