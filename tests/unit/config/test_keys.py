"""Keys: those of the schema, what unknown ones mean, and which have an effect."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

from nemo_rl_lite.config import composition, keys
from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import ActiveIf
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.validation.notes import FACTS, idle_note

NO_VALIDATION = "algorithm.val_at_start=false algorithm.val_at_end=false algorithm.val_period=0"
PARTIAL = (
    "algorithm.rollouts.source=queue generation.colocated.sleep=true "
    "algorithm.loss_fn.use_importance_sampling_correction=true"
)


def paths(node: Any, prefix: str = "") -> Iterator[str]:
    for name, child in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{name}"
        yield from paths(child, f"{prefix}{name}.")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_keys_of_the_schema_are_those_of_the_files(algorithm):
    composed = OmegaConf.to_container(composition.compose_files([f"algorithm={algorithm}"]), resolve=False)
    found = {key for key in paths(composed) if not keys.is_open(key) or keys.is_section(key)}
    assert found == set(keys.known_keys(algorithm))
    assert keys.owners("algorithm.seed") == list(ALGORITHMS) and keys.owners("algorithm.name.x") == []


def test_any_key_may_stand_in_the_sections_of_others():
    assert keys.is_section("generation.vllm_kwargs") and keys.is_open("generation.vllm_kwargs.a.b")
    assert not keys.is_open("generation.vllm_cfg.a") and keys.is_open("reward.terms.mine.kwargs.x")


def test_what_is_composed_is_the_callers_to_change():
    changed = composition.compose_files(["algorithm.seed=3"])
    OmegaConf.update(changed, "policy.precision", "changed")
    assert (
        composition.compose_files([]).policy.precision == "float32"
        and composition.compose_files([]).algorithm.seed == 42
    )


@pytest.mark.parametrize(
    ("key", "algorithm", "fix"),
    [
        # TRL, verl and everyday words.
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "grpo", "generation.vllm_cfg.tensor_parallel_size=1"),
        ("actor.megatron.tensor_model_parallel_size", "grpo", "policy.megatron_cfg.tensor_model_parallel_size=1"),
        ("actor_rollout_ref.model.path", "grpo", "policy.model_name=1"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "grpo", "algorithm.val_samples_per_problem=1"),
        ("actor.ppo_max_token_len_per_gpu", "grpo", "policy.sequence_packing.train_mb_tokens=1"),
        ("actor.loss_agg_mode", "grpo", "did you mean algorithm.loss_fn.token_level_loss?"),
        ("trainer.save_freq", "grpo", "checkpoint.save_period=1"),
        ("data.train_max_samples", "grpo", "data.max_samples=1"),
        ("actor.fsdp_config.param_offload", "grpo", "offload=FILE, such as offload=auto"),
        ("lora_r", "grpo", "policy.megatron_cfg.peft.dim=1 policy.megatron_cfg.peft.enabled=true"),
        ("loss_fn.use_on_policy_kl_approximation", "grpo", "true or false"),
        ("policy.dtensor_cfg.cpu_offload", "grpo", "offload=FILE, such as"),
        ("async", "grpo", "async=one_step_off, async=queue"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "grpo",
            "policy.train_global_batch_size = 1 x algorithm.num_generations_per_prompt: it counts sequences",
        ),
        ("epsilon_high", "grpo", "algorithm.loss_fn.ratio_clip_max=1, or for TRL's CISPO 1 - 1"),
        ("actor.clip_ratio_high", "grpo", "algorithm.loss_fn.ratio_clip_max=1"),
        ("epsilon", "grpo", "algorithm.loss_fn.ratio_clip_min=1 algorithm.loss_fn.ratio_clip_max=1"),
        ("loss_type", "dpo", "did you mean algorithm.preference_loss?"),
        ("loss_type", "grpo", "algorithm=FILE, such as algorithm=dapo"),
        ("rpo_alpha", "dpo", "algorithm.sft_loss_weight=1"),
        ("rpo_alpha", "grpo", "algorithm.sft_loss_weight=1, which needs algorithm=dpo"),
        ("data.train_max_samples", "grpo", "data.max_samples=1"),
        ("output_dir", "grpo", "hydra.run.dir=1"),
        # NeMo-RL.
        ("policy.tokenizer.name", "grpo", "leave it out"),
        ("policy.megatron_cfg.optimizer.clip_grad", "grpo", "policy.max_grad_norm=1"),
        ("policy.megatron_cfg.fp8_cfg.fp8_param", "grpo", "leave it out"),
        ("policy.generation.vllm_cfg.max_model_len", "grpo", "leave it out"),
        ("policy.generation.vllm_cfg.paint", "grpo", "the section is generation here; --cfg job lists its keys"),
        ("checkpointing", "grpo", "did you mean checkpoint?"),
        ("data.train.split_validation_size", "grpo", "data.validation_fraction=1"),
        ("sft.max_num_epochs", "sft", "algorithm.max_num_epochs=1"),
        ("dpo.preference_loss_weight", "grpo", "algorithm.preference_loss_weight, which needs algorithm=dpo"),
        ("grpo.num_prompt_per_step", "grpo", "did you mean algorithm.num_prompts_per_step?"),
        # Of another algorithm, or misspelt.
        ("algorithm.early_stop_patience", "grpo", "remove it, or algorithm=sft"),
        ("reward.nam", "grpo", "did you mean reward.name?"),
        ("polcy.precision", "grpo", "did you mean policy.precision?"),
        ("policy.megatron.peft.enabled", "grpo", "did you mean policy.megatron_cfg.peft.enabled?"),
        ("algorithm.num_prompts", "grpo", "did you mean algorithm.num_prompts_per_step?"),
        ("reward.terms.tags.pattern", "grpo", "reward.terms.tags.kwargs.pattern, where the reward has such"),
        # Many sections have such a key, or none has one like it.
        ("some.name", "grpo", "remove it, or search with nrl-lite keys WORD"),
        ("some.enabled", "grpo", "remove it, or search with nrl-lite keys WORD"),
        ("policy.colour", "grpo", "remove it, or search with nrl-lite keys WORD"),
    ],
)
def test_an_unknown_key_is_answered_with_what_is_meant(key, algorithm, fix):
    assert keys.unknown_key(key, "1", algorithm).fix.startswith(fix)


def texts(answer: Any) -> Iterator[str]:
    """All texts of an answer: it is one, a list, or one for each value."""
    if isinstance(answer, str):
        yield answer
    else:
        for one in answer.values() if isinstance(answer, dict) else answer:
            yield from texts(one)


@pytest.mark.parametrize("part", ["names", "nemo_rl", "sections", "files", "short"])
def test_answers_name_keys_and_files_that_there_are(part):
    for answer in texts(list(keys._aliases(part).values())):
        for word in re.findall(r"(?:^|(?<= ))\+?([a-z]\w*(?:\.\w+)+|\w+(?==))(?==|[,; ]|$)", answer):
            known = word in keys.known_keys() or keys.is_open(word) or word in (keys.RUN_FOLDER, *keys.groups())
            assert known or word in ("config.json", *keys._aliases("short")), answer
        for group, file in re.findall(r"\b([a-z]+)=([a-z]\w*)", answer):
            assert group not in keys.groups() or file in keys.groups()[group], answer


def conditions(kind: Any, prefix: str = "") -> Iterator[tuple[str, ActiveIf]]:
    variants = {"algorithm": [row.options for row in ALGORITHMS.values()]}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        yield from ((prefix, one) for one in get_args(hint)[1:] if isinstance(one, ActiveIf))
        for below in variants.get(f"{prefix}{name}", [get_type_hints(kind)[name]]):
            if dataclasses.is_dataclass(below):
                yield from conditions(below, f"{prefix}{name}.")


def test_a_condition_names_a_key_or_a_fact():
    found = list(conditions(Config))
    names = [f"{prefix[:-1]}{one.key}" if one.key.startswith(".") else one.key for prefix, one in found]
    assert len(found) > 100 and {name for name in names if name not in keys.known_keys()} == set(FACTS)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ("logger.wandb.project=x logger.wandb_enabled=true logger.wandb.mode=offline", ""),
        ("logger.wandb.project=x", "logger.wandb.project (needs logger.wandb_enabled)"),
        ("algorithm=sft reward=math", "reward (needs an algorithm that generates)"),
        ("offload=pinned algorithm.seed=1", "offload (needs GPUs)"),
        ("policy.megatron_cfg.peft.enabled=false", ""),
        ("environment=none", ""),
        (
            "generation.colocated.sleep=true",
            "generation.colocated.sleep (needs vLLM on GPUs, or a queue of rollouts)",
        ),
        (PARTIAL, ""),
        (
            "policy.sequence_packing.enabled=true policy.train_micro_batch_size=2",
            "policy.train_micro_batch_size (needs fixed batches)",
        ),
        ("policy.dynamic_batching.enabled=true policy.sequence_length_round=8", ""),
        ("policy.sequence_length_round=8", "policy.sequence_length_round (needs packed or dynamic batches)"),
        ("data.label_column=x", "data.label_column (needs unpaired as data)"),
        (
            "policy.megatron_cfg.num_layers_in_first_pipeline_stage=2",
            "policy.megatron_cfg.num_layers_in_first_pipeline_stage "
            "(needs policy.megatron_cfg.pipeline_model_parallel_size>1)",
        ),
        (
            f"{NO_VALIDATION} algorithm.max_val_samples=9",
            "algorithm.max_val_samples (needs validations)",
        ),
        (
            "refit.bucket_bytes=65536 refit.buffer_memory_ratio=0.1",
            "refit.buffer_memory_ratio (needs refit.bucket_bytes=null)",
        ),
    ],
)
def test_a_key_without_effect_is_named_with_what_it_needs(overrides, note):
    given = [one.partition("=")[0] for one in overrides.split()]
    found = idle_note(compose_config(overrides.split()), given)
    assert found == (f"no effect in this run: {note}" if note else "")
