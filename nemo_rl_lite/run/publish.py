"""Model cards of an exported model and its adapters, and their upload to the Hugging Face hub."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData

from nemo_rl_lite.checkpoint.resume import changed
from nemo_rl_lite.config.algorithms import generates, has_teacher
from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sources import source_configs
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.models.folder import exported
from nemo_rl_lite.models.shape import is_hub_name
from nemo_rl_lite.observability.environment import ENVIRONMENT_FILE, described
from nemo_rl_lite.observability.summary import View, view_of
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.report.record import Entry, read_json, read_metrics
from nemo_rl_lite.validation.compose import default_values
from nemo_rl_lite.validation.rewards import held_out_label

CARD = "README.md"
_TAG = "nemo_rl_lite"
# Fields that a card inherits from the base model's card.
_INHERITED = {"license", "license_name", "license_link", "language", "pipeline_tag"}
# Keys that a card shows even with their default values, and those that say nothing about the model.
_SHOWN = (
    *("policy.model_name", "algorithm.name", "algorithm.seed"),
    *("algorithm.num_prompts_per_step", "algorithm.num_generations_per_prompt"),
    *("policy.train_global_batch_size", "policy.max_total_sequence_length", "policy.precision"),
    *("policy.megatron_cfg.optimizer.lr", "data.name"),
)
_HIDDEN = ("logger.", "checkpoint.", "profile.", "run_name.")
_OF_ROLLOUTS = ("generation.", "refit.", "reward.", "environment.", "agent.")
# The place of the example in the text that cards share.
_USE = "{use}"
_USES = (
    """```python
from transformers import pipeline

generate = pipeline("text-generation", "{folder}")  # this folder, or its name on the hub
print(generate([{{"role": "user", "content": "..."}}])[0]["generated_text"][-1]["content"])
```
""",
    """```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{folder}")  # also loads {base}
```

```bash
vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned={folder}
```
""",
)


def write_cards(model: Path, config: Config, run: Path, step: int | None = None) -> None:
    """Write README.md into the exported folder `model`, and into its adapters' folder. `run`: the folder with the
    metrics; `step`: the checkpoint that was exported, None for the end of the run.

    The base model's card, which an export copies, gives license and language.
    """
    inherited, base = _front_matter(model / CARD), config.policy.model_name
    hub_name = base if is_hub_name(base) else None
    if hub_name is None and _TAG in (inherited.get("tags") or ()):
        # The base is a model of this package, and names the model that it comes from.
        hub_name = inherited.get("base_model")
    lora, used = config.policy.megatron_cfg.peft, [one.data for one in source_configs(config).values()]
    datasets = [str(one.path) for one in used if one.name == "hub" and is_hub_name(str(one.path))]
    data = ModelCardData(
        base_model=hub_name,
        datasets=list(dict.fromkeys(datasets)) or None,
        pipeline_tag="text-generation",
        tags=[_TAG, config.algorithm.name, *(["lora"] if lora.enabled else [])],
    )
    for key in _INHERITED & inherited.keys():
        setattr(data, key, inherited[key])
    base = hub_name or str(_shown(base))
    text = _text(config, base, run, step)
    for folder, library, use in zip(exported(config, model), ("transformers", "peft"), _USES, strict=False):
        data.library_name = library
        use = use.format(folder=folder.name, base=base, rank=lora.dim)
        (folder / CARD).write_text(f"---\n{data.to_yaml()}\n---\n{text.replace(_USE, use)}")


def push(folders: Sequence[Path], name: str, private: bool) -> str:
    """Upload the `exported` folders to the repository `name` of the hub, created if it is missing. Adapters go to the
    subfolder `adapter`. Returns the repository's address.

    Raises:
        LauncherError: the upload failed; its message has the commands that repeat it.
    """
    places = dict(zip(folders, (".", "adapter"), strict=False))
    try:
        api = HfApi()
        made = api.create_repo(name, private=private, exist_ok=True)
        for folder, place in places.items():
            api.upload_folder(
                repo_id=made.repo_id, folder_path=folder, path_in_repo=place, commit_message=f"Upload {folder.name}"
            )
    except Exception as error:  # network, hub and token may fail in any way; the folders are complete
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
        flag = " --private" if private else ""
        commands = "\n".join(f"  hf upload {name} {folder} {place}{flag}" for folder, place in places.items())
        raise LauncherError(f"{folders[0]} was not pushed to the hub: {cause}; to try again:\n{commands}") from error
    return str(made)


def _front_matter(card: Path) -> dict[str, Any]:
    """Return the metadata of a card; empty if there is none."""
    try:
        return ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return {}


def _text(config: Config, base: str, run: Path, step: int | None) -> str:
    """Return the text of a card, with `_USE` instead of its example."""
    algorithm, environment = config.algorithm.name, read_json(run / ENVIRONMENT_FILE, [])
    last = math.inf if step is None else step
    measured = [entry for entry in read_metrics(run / METRICS_FILE, []) if (entry["step"] or 0) <= last]
    taken = max((entry["step"] or 0 for entry in measured), default=step or 0)
    view = view_of(algorithm, held_out_label(dict(flatten(described(config)))))
    rows = [f"| {label} | {before} | {after} |" for label, before, after in _results(view, measured)]
    results = ["## Results", "", "| | at the start | at the end |", "|---|---:|---:|", *rows, ""] if rows else []
    link = f"[{base}](https://huggingface.co/{base})" if is_hub_name(base) else f"`{base}`"
    title = algorithm.upper() if len(algorithm) <= len("orpo") else algorithm
    settings = yaml.safe_dump(_settings(config), sort_keys=False, allow_unicode=True)
    hardware = environment.get("hardware", {})
    machine = next(iter(hardware.get("gpus", ())), hardware.get("cpu"))
    made_with = [f"{name} {version}" for name, version in environment.get("versions", {}).items()]
    return "\n".join(
        [
            f"\n# {config.run_name}\n",
            f"{link} after {taken:g} steps of {title} with {_TAG}.\n",
            *results,
            f"## Use\n\n{_USE}",
            "## Training\n\nSettings that matter most or differ from the defaults:\n",
            f"```yaml\n{settings}```\n",
            f"{'; '.join(filter(None, [machine, ', '.join(made_with)]))}\n",
        ]
    )


def _results(view: View, measured: Sequence[Entry]) -> Iterator[tuple[str, str, str]]:
    """Yield label, first and last value of each curve of the view that was measured more than once."""
    for curve in (curve for panel in view for curve in panel.curves):
        values = [value for entry in measured if (value := entry.get(curve.metric)) is not None]
        if len(values) > 1:
            yield curve.label, f"{values[0]:.{curve.decimals}f}", f"{values[-1]:.{curve.decimals}f}"


def _settings(config: Config) -> dict[str, Any]:
    """Return nested settings, those of `_SHOWN` first. A path becomes its last part: cards are published."""
    keys = dict(flatten(described(config)))
    unusual = [key for key in changed(default_values(config.algorithm.name), keys, ignored=()) if key in keys]
    hidden = (*_HIDDEN, *(() if generates(config) else _OF_ROLLOUTS), *(() if has_teacher(config) else ("teacher.",)))
    nested: dict[str, Any] = {}
    for key in dict.fromkeys([*(key for key in _SHOWN if key in keys), *unusual]):
        if f"{key}.".startswith(hidden) or _is_the_runs(key, keys):
            continue
        *groups, last = key.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = _shown(keys[key])
    return nested


def _is_the_runs(key: str, keys: Mapping[str, Any]) -> bool:
    """Return whether a key of a source has the run's own value."""
    group, _, own = key.partition("sources.")
    names = own.partition(".")[2]
    same = (keys[one] for one in (f"data.{names}", names, f"generation.{names}") if one in keys)
    return group == "data." and next(same, None) == keys[key]


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return Path(value).name if isinstance(value, str) and re.match(r"[~/.]\S*/\S+$", value) else value
