"""Values laid over a copy of what Hydra has composed give what Hydra itself composes."""

import re
from collections.abc import Iterator

import pytest
from omegaconf import Node, OmegaConf

from nemo_rl_lite.config import keys
from nemo_rl_lite.config.overrides import check_overrides
from nemo_rl_lite.errors import ConfigError
from tests.unit.rules.test_bad_configs import CASES, split

# Valid or not, a form each.
FORMS = [
    [],
    ["algorithm.seed=1", "algorithm.seed=2"],
    ["++algorithm.seed=7"],
    ["+algorithm.seed=7"],
    ["+algorithm.new=7"],
    ["++algorithm.new=7"],
    ["algorithm.new=7"],
    ["no_section.at_all=7"],
    ["++new={a: [1, {b: c}]}", "new.a=null"],
    ["~algorithm.seed"],
    ["~algorithm.seed=42"],
    ["~algorithm"],
    ["~recipes"],
    ["algorithm=null"],
    ["algorithm={seed: 3}"],
    ["algorithm={seed: 3}", "algorithm=sft"],
    ["algorithm.seed=4", "algorithm={seed: 3}"],
    ["policy=null", "policy.precision=float32"],
    ["recipes=null"],
    ["recipes=no-such-recipe"],
    ["algorithm=no-such-algorithm"],
    ["policy@other=megatron"],
    ["+policy@other=megatron"],
    ["+algorithm=sft"],
    ["algorithm=sft", "algorithm=dpo"],
    ["offload=logprob", "policy.offload_optimizer_states_for_logprob=false"],
    ["policy.offload_optimizer_states_for_logprob=true", "offload=none"],
    ["algorithm.seed=1,2"],
    ["algorithm=grpo,sft"],
    ["algorithm.seed=range(1,4)"],
    ["algorithm=glob(*)"],
    ["generation.stop_strings=[a,'b c',\"d\"]"],
    ["++generation.vllm_kwargs={block_size:16}", "++generation.vllm_kwargs.more.of=[1,2.5,null,true]"],
    ["++generation.vllm_kwargs.block_size=16", "++generation.vllm_kwargs={dtype:half}"],
    ["run_name='a=b, ${algorithm.name}'"],
    ["run_name=${algorithm.seed}-${data.name}", "algorithm.seed=3"],
    ["run_name=${oc.env:HOME}"],
    ["run_name='${nope'"],
    ["run_name=\\${algorithm.name}"],
    ["run_name=???"],
    ["run_name="],
    ["run_name=''"],
    ["run_name='ünï-code'"],
    ["algorithm.seed=int('3')"],
    ["policy.megatron_cfg.optimizer.lr=1e-4"],
    ["policy.megatron_cfg=null"],
    ["policy.megatron_cfg=null", "policy.megatron_cfg.optimizer.lr=1"],
    ["policy.megatron_cfg.optimizer.lr.deeper=1"],
    ["policy.precision="],
    ["just-a-word"],
    ["policy.precision=["],
    ["hydra.run.dir=here"],
    ["hydra.job.name=other", "algorithm.seed=3"],
    ["hydra.no_such_key=1"],
    ["hydra/job_logging=disabled"],
    ["run_name=${hydra:job.name}"],
]
RECIPES = [f"recipes={name}" for name in keys.groups()["recipes"]]


def outcome(compose, overrides: list[str]) -> object:
    """What is composed, types and flags included, or the error."""
    try:
        return described(compose(overrides))
    except ConfigError as error:
        return str(error)


def described(node: Node) -> object:
    """What a node holds, not resolved, in its order; whether keys may be added to it, and values changed."""
    flags, value = (OmegaConf.is_struct(node), OmegaConf.is_readonly(node)), node._value()
    if isinstance(value, dict):
        return flags, [(key, described(child)) for key, child in value.items()]
    if isinstance(value, list):
        return flags, [described(child) for child in value]
    return flags, type(node), repr(value)


def assert_same(overrides: list[str]) -> None:
    assert outcome(keys.compose_files, overrides) == outcome(keys.compose_with_hydra, overrides), overrides


@pytest.mark.parametrize("overrides", FORMS, ids=" ".join)
def test_every_form_is_taken_or_refused_as_hydra_does(overrides):
    assert_same(overrides)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_over_every_recipe(recipe):
    assert_same([recipe, "algorithm.seed=3", "policy.megatron_cfg.optimizer={lr: 1e-4}", "run_name=${data.name}"])


@pytest.mark.slow
def test_what_the_suite_has_of_overrides_alone_and_together():
    """Those of a set of files are composed together where no key is in two of them, which would hide the first."""
    batches = list(together())
    assert sum(map(len, batches)) > 300
    for overrides in batches:
        assert_same(overrides)


def together() -> Iterator[list[str]]:
    cases = [check_overrides([word for word in split(case) if word[0] != "-"])[0] for case in CASES]
    waiting = [(sorted(filter(_chooses, words)), [word for word in words if not _chooses(word)]) for words in cases]
    while waiting:
        (files, batch), *others = waiting
        waiting = []
        for own_files, values in others:
            if own_files == files and not any(_overlap(one, other) for one in values for other in batch):
                batch = batch + values
            else:
                waiting.append((own_files, values))
        yield [*files, *batch]


def _chooses(word: str) -> bool:
    return _key(word) in keys.groups()


def _overlap(one: str, other: str) -> bool:
    first, second = f"{_key(one)}.", f"{_key(other)}."
    return first.startswith(second) or second.startswith(first)


def _key(word: str) -> str:
    return re.split("=", word.lstrip("+~"))[0]


def test_what_is_composed_is_the_callers_to_change():
    changed = keys.compose_files(["algorithm.seed=3"])
    OmegaConf.update(changed, "policy.precision", "changed")
    assert keys.compose_files([]).policy.precision == "float32" and keys.compose_files([]).algorithm.seed == 42


@pytest.mark.parametrize(
    ("key", "choices", "fix"),
    [
        ("report_to", (), "did you mean logger.wandb_enabled and logger.tensorboard_enabled?"),
        ("model_name_or_path", (), "did you mean policy.model_name?"),
        ("batch_size", (), "did you mean policy.train_global_batch_size?"),
        ("actor_rollout_ref.rollout.n", (), "did you mean algorithm.num_generations_per_prompt?"),
        ("trainer.save_freq", (), "did you mean checkpoint.save_period?"),
        ("lora_r", (), "did you mean policy.megatron_cfg.peft.dim?"),
        ("beta", ("algorithm=dpo",), "did you mean algorithm.reference_policy_kl_penalty?"),
        ("num_train_epochs", (), "algorithm.max_num_steps: this algorithm counts steps"),
        ("num_train_epochs", ("algorithm=sft",), "did you mean algorithm.max_num_epochs?"),
        ("output_dir", (), "hydra.run.dir=FOLDER"),
        ("actor_rollout_ref.rollout.val_kwargs.n", (), "did you mean algorithm.val_samples_per_problem?"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", (), "did you mean algorithm.val_temperature?"),
        ("custom_reward_function.path", (), "reward.name=path/to/file.py:function"),
        ("data.filter_overlong_prompts", (), "data.too_long=drop"),
        ("loss_type", ("algorithm=dpo",), "did you mean algorithm.preference_loss?"),
        ("rpo_alpha", ("algorithm=dpo",), "did you mean algorithm.sft_loss_weight?"),
    ],
)
def test_a_key_of_another_launcher_is_answered_with_the_one_that_is_meant(key, choices, fix):
    assert keys.unknown_key(key, "1", keys.known_keys(choices)).fix == fix


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("generation.tensor_parallel_size", "generation.vllm_cfg.tensor_parallel_size"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "generation.vllm_cfg.tensor_parallel_size"),
        ("actor.megatron.tensor_model_parallel_size", "policy.megatron_cfg.tensor_model_parallel_size"),
        ("actor_rollout_ref.model.path", "policy.model_name"),
        ("trainer.experiment_name", "run_name"),
        ("trainer.val_before_train", "algorithm.val_at_start"),
        ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_newest"),
        ("actor.use_dynamic_bsz", "policy.dynamic_batching.enabled"),
        ("actor.ppo_max_token_len_per_gpu", "policy.sequence_packing.train_mb_tokens"),
        ("rollout.log_prob_max_token_len_per_gpu", "policy.sequence_packing.logprob_mb_tokens"),
        ("actor.ulysses_sequence_parallel_size", "policy.megatron_cfg.context_parallel_size"),
        ("actor.loss_agg_mode", "algorithm.loss_fn.token_level_loss"),
        ("actor.kl_loss_type", "algorithm.loss_fn.reference_policy_kl_type"),
        ("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_rewards"),
        ("algorithm.filter_groups.enable", "algorithm.use_dynamic_sampling"),
        ("rollout.multi_turn.max_assistant_turns", "environment.max_turns"),
        ("vllm_importance_sampling_cap", "algorithm.loss_fn.truncated_importance_sampling_ratio"),
        ("mask_truncated_completions", "algorithm.overlong_filtering"),
        ("delta", "algorithm.loss_fn.ratio_clip_c"),
        ("reward_weights", "reward.terms"),
        ("packing", "policy.sequence_packing.enabled"),
        ("assistant_only_loss", "data.train_on"),
        ("save_total_limit", "checkpoint.keep_newest"),
        ("vllm_mode", "generation.colocated.enabled"),
        ("lora_dropout", "policy.megatron_cfg.peft.dropout"),
        ("peft.r", "policy.megatron_cfg.peft.dim"),
    ],
)
def test_names_of_trl_and_verl(key, meant):
    assert keys.unknown_key(key, "1", keys.known_keys()).fix == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("data.max_samples", "data is not cut"),
        ("actor.fsdp_config.param_offload", "offload=auto"),
        ("actor.fsdp_config.optimizer_offload", "offload=auto"),
        ("custom_reward_function.name", "reward.name=path/to/file.py:function"),
        ("importance_sampling_level", "algorithm=gspo, or algorithm.loss_fn.sequence_level_importance_ratios=true"),
        ("rpo_alpha", "algorithm.sft_loss_weight, which needs algorithm=dpo"),
        ("policy.megatron_cfg.converter_type", "leave it out"),
        ("loss_type", "algorithm=dapo"),
        ("loss_type", "algorithm=dpo has algorithm.preference_loss=ipo"),
    ],
)
def test_what_no_key_stands_for(key, words):
    assert words in keys.unknown_key(key, "1", keys.known_keys()).fix


LEAVE, LISTED = "leave it out", "remove it: no key here is like it; --cfg job lists them"


@pytest.mark.parametrize(
    ("key", "choices", "fix"),
    [
        ("policy.tokenizer.name", (), f"{LEAVE}: the tokenizer is read from the folder of policy.model_name"),
        ("policy.tokenizer.use_fastokens", (), f"{LEAVE}: there is no such choice here"),
        ("policy.megatron_cfg.optimizer.clip_grad", (), "did you mean policy.max_grad_norm?"),
        (
            "policy.megatron_cfg.fp8_cfg.fp8_recipe",
            (),
            f"{LEAVE}: training is in bfloat16 or float32 (policy.precision)",
        ),
        ("policy.generation.vllm_cfg.max_model_len", (), "did you mean policy.max_total_sequence_length?"),
        ("policy.generation.vllm_cfg.use_tqdm", (), "the section is generation here; --cfg job lists its keys"),
        ("loss_fn.use_cispo", (), "algorithm.loss_fn.policy_loss=cispo"),
        ("checkpointing", (), "did you mean checkpoint?"),
        ("checkpointing.enabled", (), "checkpoint.save_period=N, with 0 for no checkpoints"),
        ("data.train.split_validation_size", (), "did you mean data.validation_fraction?"),
        ("grpo.max_num_epochs", (), "algorithm.max_num_steps: this algorithm counts steps"),
        ("sft.max_num_epochs", ("algorithm=sft",), "did you mean algorithm.max_num_epochs?"),
        ("dpo.preference_loss_weight", (), "algorithm.preference_loss_weight, which needs algorithm=dpo"),
        ("sft.val_batches", ("algorithm=sft",), "did you mean algorithm.max_val_samples?"),
        # One that is misspelt.
        ("grpo.num_prompt_per_step", (), "did you mean algorithm.num_prompts_per_step?"),
    ],
)
def test_a_key_of_nemo_rl_is_answered_with_what_takes_its_place(key, choices, fix):
    assert keys.unknown_key(key, "1", keys.known_keys(choices)).fix == fix


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        # Many sections have such a key.
        ("some.name", LISTED),
        ("some.enabled", LISTED),
        ("kwargs.eps", LISTED),
        ("reward.nam", "did you mean reward.name?"),
        ("polcy.precision", "did you mean policy.precision?"),
        ("policy.megatron.peft.enabled", "did you mean policy.megatron_cfg.peft.enabled?"),
        ("algorithm.num_prompts", "did you mean algorithm.num_prompts_per_step?"),
    ],
)
def test_a_guess_is_a_key_that_is_like_the_one_that_was_given(key, fix):
    assert keys.unknown_key(key, "1", keys.known_keys()).fix == fix
