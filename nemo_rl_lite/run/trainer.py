"""The Python API: `GRPO("Qwen/Qwen3-0.6B", reward=score, data=rows).train()`, in a script or a notebook.

A trainer builds the overrides of a command line and runs the same code as the command.
"""

import json
import math
import os
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_rl_lite.compat.event_loop import hidden_event_loop
from nemo_rl_lite.config.arguments import literal, overrides_of
from nemo_rl_lite.config.keys import RUN_FOLDER, groups
from nemo_rl_lite.config.user_code import own_name
from nemo_rl_lite.errors import ConfigError, LauncherError, Violation
from nemo_rl_lite.observability.callbacks import Callbacks, OnRollout, OnStep
from nemo_rl_lite.observability.timer import restart_clock
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.run.command import DRY_RUN, Flags, checked, folder_of, logged_to, run_in
from nemo_rl_lite.run.inputs import Inputs
from nemo_rl_lite.system.pool import ending_pools
from nemo_rl_lite.system.stopping import forget_signals
from nemo_rl_lite.validation.compose import compose_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from nemo_rl_lite.observability.summary import Summary
    from nemo_rl_lite.planning.page import Plan

Rows = Iterable[Mapping[str, Any]]
"""Dictionaries, a `datasets.Dataset` or a `pandas.DataFrame`."""
Data = str | Path | Rows
"""Rows, a file, a Hub dataset (`"openai/gsm8k"`) or a preset of configs/data (`"gsm8k"`)."""
Code = str | Callable[..., Any]
"""A function or class, its path (`"my.py:score"`, `"package.module.score"`), or a name of this package (`"math"`)."""
_FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".csv")
# One training at a time: a process has one Ray.
_TRAINING = threading.Lock()


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run."""

    folder: Path
    """The run's folder, which `nrl-lite report`, `evaluate`, `chat` and `serve` take."""
    summary: "Summary"
    stopped: bool
    """True if a callback or `stop()` ended the run early."""

    @property
    def history(self) -> list[dict[str, float]]:
        """All entries of the metrics log, with `step` and `time`; NaN for values that were not finite."""
        entries = map(json.loads, (self.folder / METRICS_FILE).read_text().splitlines())
        return [{name: math.nan if value is None else value for name, value in one.items()} for one in entries]

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: value for entry in self.history for name, value in entry.items()}

    @property
    def model_path(self) -> Path:
        """The trained model as a Hugging Face folder, for `from_pretrained`.

        Raises:
            LauncherError: the run has not exported a model.
        """
        if not (folder := self.folder / "hf").is_dir():
            export = f"nrl-lite export {self.folder} FOLDER writes it from a checkpoint"
            raise LauncherError(f"{folder}: the run has exported no model (checkpoint.export_hf_at_end); {export}")
        return folder

    def load(self, **options: Any) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Load model and tokenizer. `options` are passed to `AutoModelForCausalLM.from_pretrained`.

        Raises:
            LauncherError: the run has not exported a model.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = self.model_path
        model: Any = AutoModelForCausalLM.from_pretrained(path, **options)
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        return model, tokenizer


class Trainer:
    """A training run. The subclasses are algorithms, such as `GRPO`."""

    algorithm: ClassVar[str]

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        data: Data | None = None,
        eval_data: Data | None = None,
        recipe: str | Path | None = None,
        output_dir: str | Path | None = None,
        on_step: OnStep | None = None,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        **keys: Any,
    ):
        """Describe a run. Nothing is checked or started yet.

        Args:
            model: a Hub model ID or a folder; None for the recipe's model or the embedded example.
            data: training rows.
            eval_data: held-out rows, a file, or a split of the Hub dataset.
            recipe: a name in `recipes/`, or a YAML file.
            output_dir: the run's folder, by default `outputs/NAME/TIME`. A folder with a checkpoint is resumed.
            on_step: receives the metrics of each step. Returning True or "stop" ends the run.
            overrides: command-line overrides, or a mapping of keys to values. They override all other arguments.
            keys: any key by its last part (`max_num_steps=20`), a section (`policy={"precision": "bfloat16"}`) or a
                preset of a group (`generation="transformers"`).
        """
        self._model, self._data, self._eval_data, self._recipe = model, data, eval_data, recipe
        self._output_dir = None if output_dir is None else Path(output_dir).expanduser()
        self._given, self._keys = overrides, keys
        self._on_step = on_step
        self._on_rollout: OnRollout | None = None
        self._callbacks = Callbacks()

    def train(self) -> TrainingResult:
        """Train to the end, or resume in `output_dir`. Return when all processes have ended.

        Raises:
            ConfigError: all problems of the arguments; nothing was started.
            DataError: invalid rows.
            CallbackError: a callback raised.
            RunStopped: SIGTERM or SIGUSR1 stopped the run, with a checkpoint.
            LauncherError: any other error that a user can act on, such as `WorkerError`.
        """
        self._callbacks = callbacks = Callbacks(self._on_step, self._on_rollout)
        with _training(), self._checked() as (overrides, inputs, folder):
            inputs.copy_to(folder)
            overrides = [*self._overrides(inputs), *overrides[-1:]]
            config = compose_config(overrides)
            folder.mkdir(parents=True, exist_ok=True)
            with logged_to(folder):
                summary = run_in(folder, config, shlex.join(["nrl-lite", "train", *overrides]), callbacks)
        return TrainingResult(folder, summary, callbacks.stopped)

    def check(self) -> None:
        """Check arguments and data and print the plan, as `nrl-lite train --dry-run`. Start nothing.

        Raises:
            ConfigError: all problems of the arguments.
            DataError: invalid rows.
        """
        with _training(), self._checked(DRY_RUN) as (overrides, _, _):
            from nemo_rl_lite.run.run import dry_run

            dry_run(compose_config(overrides), overrides, self._output_dir)

    def plan(self, gpu: str | None = None) -> "Plan":
        """Predict the run's memory and step time, and whether it fits, as `nrl-lite plan`. Start nothing.

        Args:
            gpu: a GPU such as "H200", or its memory such as "80GiB"; None for this machine's, or "H100".

        Raises:
            ConfigError: all problems of the arguments.
        """
        with self._checked(here=False) as (overrides, _, _):
            from nemo_rl_lite.models.shape import find_shape
            from nemo_rl_lite.planning.budget import size_of
            from nemo_rl_lite.planning.page import make_plan

            config = compose_config(overrides)
            return make_plan(config, overrides, find_shape(config.policy.model_name), size_of(gpu), None)

    def stop(self) -> None:
        """Stop after the current step, with a checkpoint and the exported model. `train` then returns. A callback or
        another thread may call this."""
        self._callbacks.stop()

    @contextmanager
    def _checked(self, *flags: str, here: bool = True) -> Iterator[tuple[list[str], Inputs, Path]]:
        """Yield valid overrides (the last one is the run's folder), the files of in-memory inputs, and the folder.

        `here`: also check this machine, as the command does with these flags.
        """
        with tempfile.TemporaryDirectory(prefix="nrl-lite-") as staged:
            inputs = Inputs(Path(staged))
            overrides = self._overrides(inputs)
            folder = self._output_dir or folder_of(overrides)
            overrides.append(f"{RUN_FOLDER}={literal(RUN_FOLDER, folder, inputs.path_of)}")
            with inputs.named():
                config = checked(Flags(flags), overrides)[0][1] if here else compose_config(overrides)
                if (name := config.algorithm.name) != self.algorithm:
                    rule = f"has algorithm={name}, and {type(self).__name__} trains with {self.algorithm}"
                    raise ConfigError([Violation("recipe", self._recipe, rule, "the class of that algorithm")])
                yield overrides, inputs, folder.absolute()

    def _overrides(self, inputs: Inputs) -> list[str]:
        found = [] if self._recipe is None else [f"recipes={self._recipe}"]
        if self._recipe is None and "algorithm" not in self._keys:
            found.append(f"algorithm={self.algorithm}")
        found += self._of_data(inputs)
        found += overrides_of(self._arguments(inputs) | self._keys, self.algorithm, inputs.path_of)
        if isinstance(self._given, Mapping):
            return [*found, *overrides_of(self._given, self.algorithm, inputs.path_of)]
        return [*found, *self._given]

    def _arguments(self, inputs: Inputs) -> dict[str, Any]:
        if self._model is None:
            return {}
        if not isinstance(self._model, str | Path):
            rule = f"is a {type(self._model).__name__}; the workers load the model from a folder or the Hub"
            raise ConfigError([Violation("model", None, rule, "its Hub model ID, or a folder of `save_pretrained`")])
        return {"policy.model_name": self._model}

    def _of_data(self, inputs: Inputs) -> list[str]:
        data, held_out, found = self._data, self._eval_data, []
        if isinstance(data, str) and not data.endswith(_FILE_ENDINGS):
            is_dataset = "/" in data and data not in groups()["data"]
            found = ["data=hub", f"data.path='{data}'"] if is_dataset else [f"data={data}"]
        elif data is not None:
            found = ["data=file", _file("data.train_path", "data", data, inputs)]
        if held_out is not None:
            is_split = isinstance(held_out, str) and not held_out.endswith(_FILE_ENDINGS)
            split = f"data.validation_split='{held_out}'"
            found.append(split if is_split else _file("data.validation_path", "eval_data", held_out, inputs))
        return found


class RolloutTrainer(Trainer):
    """A training run on the model's own samples."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        reward: Code | Sequence[Code] | Mapping[Any, Any] | None = None,
        data: Data | None = None,
        eval_data: Data | None = None,
        environment: Code | Mapping[str, Any] | None = None,
        agent: Code | Mapping[str, Any] | None = None,
        tools: Sequence[Code] = (),
        recipe: str | Path | None = None,
        output_dir: str | Path | None = None,
        on_step: OnStep | None = None,
        on_rollout: OnRollout | None = None,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        **keys: Any,
    ):
        """Describe a run. Nothing is checked or started yet. For the other arguments, see `Trainer`.

        Args:
            reward: a function `(response, answer) -> float`, or a class of such objects. A list, or a mapping to
                weights, is summed. None: the recipe's reward, or equality with the answer.
            data: training rows with a `prompt` and an `answer`.
            environment: a class for multi-turn episodes, or its section (`{"name": MyEnvironment, "max_turns": 4}`).
            agent: a function that plays an episode, or its section.
            tools: functions that the model may call.
            on_rollout: receives the step and the samples of each rollout after training on it, as rows of `rollouts/`.
        """
        described = {"data": data, "eval_data": eval_data, "recipe": recipe, "output_dir": output_dir}
        super().__init__(model, **described, on_step=on_step, overrides=overrides, **keys)
        self._reward, self._environment, self._agent, self._tools = reward, environment, agent, tools
        self._on_rollout = on_rollout

    def _arguments(self, inputs: Inputs) -> dict[str, Any]:
        found = super()._arguments(inputs) | _rewards(self._reward, inputs)
        if self._tools:
            found |= {"environment": "tools", "environment.kwargs.tools": list(self._tools)}
        given = {"environment": self._environment, "agent": self._agent}
        return found | {name: value for name, value in given.items() if value is not None}


class GRPO(RolloutTrainer):
    """Group relative policy optimisation: `GRPO("Qwen/Qwen3-0.6B", reward=score, data=rows).train()`.

    Its variants are presets: `GRPO(..., algorithm="dapo")`.
    """

    algorithm = "grpo"


class Distillation(RolloutTrainer):
    """On-policy distillation: `Distillation("student", data=rows, teacher={"model_name": "teacher"}).train()`."""

    algorithm = "distillation"


class SFT(Trainer):
    """Supervised fine-tuning: `SFT("Qwen/Qwen3-0.6B", data=rows).train()`."""

    algorithm = "sft"


class DPO(Trainer):
    """Direct preference optimisation on rows with `chosen` and `rejected`: `DPO(model, data=rows).train()`."""

    algorithm = "dpo"


class ORPO(Trainer):
    """Odds ratio preference optimisation, without a reference model: `ORPO(model, data=rows).train()`."""

    algorithm = "orpo"


class KTO(Trainer):
    """Kahneman-Tversky optimisation on rows with a `label`: `KTO(model, data=rows).train()`."""

    algorithm = "kto"


def _file(key: str, name: str, data: Data, inputs: Inputs) -> str:
    path = data if isinstance(data, str | Path) else inputs.rows(name, data)
    return f"{key}={literal(key, path, inputs.path_of)}"


def _rewards(reward: Any, inputs: Inputs) -> dict[str, Any]:
    """Return the keys of one reward or of a sum."""
    if reward is None:
        return {}
    if isinstance(reward, list | tuple):
        reward = dict.fromkeys(reward, 1.0)
    if not isinstance(reward, Mapping):
        # Drop the arguments of the recipe's reward.
        return {"reward": reward} if isinstance(reward, str) else {"reward": "exact_match", "reward.name": reward}
    if not all(isinstance(weight, int | float) for weight in reward.values()):
        return {"reward": reward}
    paths = {one if isinstance(one, str) else inputs.path_of("reward", one): weight for one, weight in reward.items()}
    # The main reward has weight 1.
    main = next(iter(paths)) if next(iter(paths.values()), 0) == 1 else "none"
    terms = {path: weight for path, weight in paths.items() if path != main}
    own = {f"reward.terms.{own_name(path)}": {"name": path, "weight": weight} for path, weight in terms.items()}
    return {"reward": "exact_match", "reward.name": main} | own


@contextmanager
def _training() -> Iterator[None]:
    """Prepare this process for a run, and restore its environment afterwards."""
    if threading.current_thread() is not threading.main_thread():
        raise LauncherError("training needs the main thread of its process, which receives signals such as Ctrl-C")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        raise LauncherError("Ray already runs in this process, and training starts its own: call ray.shutdown() first")
    if not _TRAINING.acquire(blocking=False):
        raise LauncherError("another training is running in this process; run one at a time")
    environ = dict(os.environ)
    try:
        forget_signals()
        restart_clock()
        with hidden_event_loop(), ending_pools():
            yield
    finally:
        # Ray reads its token once per process. It also sets variables such as PYTHONBREAKPOINT.
        kept = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
        os.environ.clear()
        os.environ.update(environ | kept)
        _TRAINING.release()
