"""Compose an evaluation: a model, data, reward, environment and sampling."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_rl_lite.config.composition import DATA_OF, as_composed, compose_files, lay_over
from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.config.overrides import check_overrides, given_keys
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import engine_hosts, engines, on_gpus
from nemo_rl_lite.config.sources import ONLY, source_configs
from nemo_rl_lite.config.user_code import file_of
from nemo_rl_lite.data.sources import validation_source
from nemo_rl_lite.errors import HIDDEN, ConfigError, Violation
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.observability.environment import described
from nemo_rl_lite.rewards.judge import terms_of
from nemo_rl_lite.run.model import CHAT_KEYS, with_effect
from nemo_rl_lite.run.serving import Served, alone
from nemo_rl_lite.system.machine import gpu_count
from nemo_rl_lite.validation.compose import is_of, resolve

SECTIONS = ("data", "reward", "environment", "agent", "generation")
_KEYS = (
    *("algorithm.seed", "policy.max_total_sequence_length", "policy.precision", *CHAT_KEYS),
    *(f"cluster.{name}" for name in ("gpus_per_node", "num_nodes", "threads_per_worker")),
    *(f"cluster.{name}" for name in ("start_timeout_s", "phase_timeout_s", "max_restarts")),
)
_OF_POLICY = ("max_total_sequence_length", "precision", "tokenizer")
_READERS = DATA_OF | {"validation_path": "file"}
# Keys of generation that do not change responses: place and number of engines. Each response has its own seed.
_PLACES = ("data_parallel_size", "colocated", "serve")


@dataclass(frozen=True)
class Options:
    """Options of the command. `problems`: maximum number (None: all); `temperature`: 0 is greedy (None:
    `generation.temperature`); `pass_reward`: the smallest reward that passes; `source`: that of a run with several."""

    samples: int
    problems: int | None
    temperature: float | None
    pass_reward: float
    source: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """A model with its configuration, and the options of the command."""

    served: Served
    options: Options

    @property
    def config(self) -> Config:
        return self.served.config

    @property
    def temperature(self) -> float:
        given = self.options.temperature
        return self.config.generation.temperature if given is None else given

    def sampling(self, end_tokens: Sequence[int]) -> Sampling:
        sampling = Sampling.of(self.config.generation, end_tokens)
        return replace(sampling, temperature=self.temperature) if self.temperature else sampling.greedy()

    def describe(self, problems: int) -> str:
        """Describe problems, reward and sampling in one line."""
        config, samples = self.config, self.options.samples
        data, generation = config.data, config.generation
        source = {"file": validation_source(data) or data.train_path, "hub": data.path, "reasoning_gym": data.task}
        rewards = " + ".join(term.name for term in terms_of(config.reward))
        playing = config.environment.name or config.agent.name
        return (
            f"evaluating {self.served.name} on {problems} held-out problems of {source.get(data.name) or data.name}"
            f"{f', in {playing}' if playing else ''}; reward {rewards}; {samples} response{'s' * (samples > 1)} "
            f"per problem, of at most {generation.max_new_tokens} tokens, "
            + (f"temperature {self.temperature:g}" if self.temperature else "greedy")
        )

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the samples and their rewards, without secrets."""
        weights = [file.stat().st_mtime for file in self.served.folder.glob("*.safetensors")]
        written = datetime.fromtimestamp(max(weights, default=0), UTC).isoformat(timespec="seconds")
        whole = described(self.config)
        template = self.config.policy.tokenizer.chat_template
        text = Path(template).expanduser().read_bytes() if template else b""
        own_rewards = [term for term in terms_of(self.config.reward) if "." in term.name]
        known = {
            "MODEL": str(self.served.folder),
            "MODEL's weights, written": written,
            "--samples": self.options.samples,
            "--problems": self.options.problems,
            "--temperature": self.temperature,
            "algorithm": {"seed": self.config.algorithm.seed},
            "policy": {name: whole["policy"][name] for name in _OF_POLICY},
            **({"policy.tokenizer.chat_template's text": sha256(text).hexdigest()[:8]} if template else {}),
            **{section: whole[section] for section in SECTIONS},
            "generation": {name: value for name, value in whole["generation"].items() if name not in _PLACES},
            **{f"code of {term.section}.name": _digest(term.name) for term in own_rewards},
        }
        return json.loads(json.dumps(known))

    def usual_folder(self) -> Path:
        """Return the default folder, in which the same command finds its samples."""
        digest = sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]
        return Path("outputs") / "evaluations" / f"{self.served.name}-{self.config.data.name}-{digest}"


def _digest(reward: str) -> str:
    """Return a digest of the file of a user's reward."""
    spec = None if (file := file_of(reward)) else find_spec(reward.rpartition(".")[0])
    source = Path(spec.origin) if spec and spec.origin else file
    return sha256(source.read_bytes()).hexdigest()[:8] if source else ""


def compose(model: Served, arguments: Sequence[str], options: Options) -> Evaluation:
    """Apply a command's overrides to the configuration of a model. Raises ConfigError: listing all invalid overrides,
    violated rules and invalid options."""
    overrides, violations = check_overrides(arguments)
    if violations:
        raise ConfigError(violations)
    overrides = with_effect(overrides, (*SECTIONS, *_KEYS))
    given = given_keys(overrides)
    if not model.of_run and not any(is_of(key, ["data"]) for key in given):
        rule = f"is missing, and {model.folder} is not the folder of a run"
        fix = "data=file data.validation_path=FILE.jsonl, or another: data=math500 reward=math"
        raise ConfigError([Violation("data", None, rule, fix)])
    model = _with_source(model, options.source, is_given=any(is_of(key, ["data"]) for key in given))
    composed = lay_over(_base(model), overrides)
    # A given path chooses what reads it.
    readers = [file for key, file in _READERS.items() if f"data.{key}" in given and composed.data.get(key) is not None]
    if readers and not {"data", "data.name"} & set(given):
        composed.data.name = readers[0]
    config = _resolved(composed, given)
    evaluation = Evaluation(replace(model, config=_with_own_engines(config)), options)
    whole = {section: asdict(getattr(config, section)) for section in SECTIONS}
    missing = [
        Violation(key, value, "is a secret, which the run's folder does not store", f"{key}=...")
        for key, value in flatten(whole)
        if value == HIDDEN
    ]
    if violations := [*_held_out(config), *missing, *_wrong_options(evaluation)]:
        raise ConfigError(violations)
    return evaluation


def _with_source(model: Served, name: str | None, is_given: bool) -> Served:
    """Return the model with the configuration of the run's source, which a run with several needs unless the data
    `is_given`. Raises ConfigError: there is no such source."""
    if model.config.data.sources and name is None and is_given:
        return replace(model, config=replace(model.config, data=replace(model.config.data, sources={})))
    sources = source_configs(model.config)
    if (name or ONLY) in sources:
        return replace(model, config=sources[name or ONLY])
    rule = f"is no source of {model.name}" if name else f"is missing, and {model.name} has several sources"
    fix = f"--source {' or '.join(sources)}" if ONLY not in sources else "leave it out: the run has no data.sources"
    raise ConfigError([Violation("--source", name, rule, fix)])


def _base(model: Served) -> DictConfig:
    """Return the model's configuration, with default training sections and without validations."""
    config = model.config
    gpus = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=vllm_gpu"] if on_gpus(config) else []
    base = compose_files(gpus)
    own, shared, gpus_here = as_composed(config), base.generation.colocated, gpu_count()
    for section in SECTIONS:
        base[section] = OmegaConf.create(own[section])
    base.generation.colocated = shared
    if on_gpus(config):
        # The run's GPUs per node, limited by this machine.
        base.generation.data_parallel_size = None
        base.cluster.gpus_per_node = min(config.cluster.gpus_per_node, gpus_here or config.cluster.gpus_per_node)
        if (hosts := engine_hosts(config)) > 1:
            base.cluster.update({"num_nodes": hosts, "gpus_per_node": config.cluster.gpus_per_node})
    for key in _OF_POLICY:
        base.policy[key] = own["policy"][key]
    base.policy.model_name = str(model.folder)
    for key in ("seed", "max_val_samples"):
        base.algorithm[key] = getattr(config.algorithm, key)
    base.algorithm.update({"val_at_start": False, "val_at_end": False, "val_period": 0})
    return base


def _resolved(composed: DictConfig, given: Sequence[str]) -> Config:
    if composed.cluster.gpus_per_node and "cluster.gpus_per_node" not in given:
        settings, wanted = composed.generation.vllm_cfg, composed.generation.data_parallel_size
        size, cluster = settings.tensor_parallel_size * settings.pipeline_parallel_size, composed.cluster
        # A larger engine spans nodes.
        if size <= cluster.gpus_per_node or cluster.num_nodes == 1:
            cluster.gpus_per_node = size * (wanted or max(1, cluster.gpus_per_node // size))

    def matters(broken: Violation) -> bool:
        # The training file is read only if problems are held out of it.
        unread = broken.key == "data.train_path" and not composed.data.validation_fraction
        return not unread and (broken.key.split(".")[0] in SECTIONS or broken.key in given)

    return resolve(composed, matters=matters)


def _with_own_engines(config: Config) -> Config:
    """Give all GPUs to the engines. On CPUs, spread the engines over the nodes like policy ranks."""
    generation, cluster = alone(config).generation, config.cluster
    one_node = cluster.num_nodes == 1
    resources = replace(
        generation.colocated.resources,
        num_nodes=None if one_node else cluster.num_nodes,
        gpus_per_node=(cluster.gpus_per_node or None) if one_node else None,
    )
    generation = replace(
        generation,
        colocated=replace(generation.colocated, resources=resources),
        serve=replace(generation.serve, enabled=False),
    )
    return replace(config, generation=generation, cluster=replace(cluster, cpu_ranks=engines(config)))


def _held_out(config: Config) -> Iterator[Violation]:
    data = config.data
    if data.name == "reverse_digits" or validation_source(data) is not None or data.validation_fraction:
        return
    keys = {"file": ("data.validation_path", "FILE"), "hub": ("data.validation_split", "test")}
    key, example = keys.get(data.name, ("data.validation_fraction", "0.1"))
    yield Violation(key, None, "is not set, and an evaluation needs held-out problems", f"{key}={example}")


def _wrong_options(evaluation: Evaluation) -> Iterator[Violation]:
    options, (lowest, highest) = evaluation.options, engine_of(evaluation.config).temperatures
    for name, value in (("--samples", options.samples), ("--problems", options.problems)):
        if value is not None and value < 1:
            yield Violation(name, value, "must be at least 1", f"{name} 1")
    given = options.temperature
    if given and not lowest <= given <= highest:
        rule = f"the {evaluation.config.generation.backend} engine takes 0 (greedy) and {lowest:g} to {highest:g}"
        yield Violation("--temperature", given, rule, f"--temperature {min(max(given, lowest), highest):g}")
    if given == 0 and options.samples > 1:
        rule = "greedy responses (--temperature 0) to a problem are all equal"
        yield Violation("--samples", options.samples, rule, "--samples 1, or a temperature above 0")
