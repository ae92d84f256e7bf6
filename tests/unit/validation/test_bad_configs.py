"""Every mistake gets one readable message that names its key; commands that work are not refused."""

import gzip
import json
import re

import pytest

from nemo_rl_lite import train
from nemo_rl_lite.config import engines
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.system import machine
from nemo_rl_lite.system.machine import check_single_launcher
from nemo_rl_lite.validation import layout
from nemo_rl_lite.validation.compose import compose_config

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "vocab_size": 90,
    "max_position_embeddings": 64,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
MEGATRON, LOSS = "policy.megatron_cfg", "algorithm.loss_fn"
OPTIMIZER, SCHEDULER, PEFT = f"{MEGATRON}.optimizer", f"{MEGATRON}.scheduler", f"{MEGATRON}.peft"
TP, PP = f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"
CP, EP = f"{MEGATRON}.context_parallel_size", f"{MEGATRON}.expert_model_parallel_size"
HYBRID = f"{MEGATRON}.hybrid_context_parallel"
LAST_STAGE, DDP = f"{MEGATRON}.num_layers_in_last_pipeline_stage", f"{MEGATRON}.distributed_data_parallel_config"
ACTIVATIONS, MODULES = f"{MEGATRON}.fine_grained_activation_offloading", f"{MEGATRON}.offload_modules"
GRAPHS, FUSION = f"{MEGATRON}.cuda_graph_impl=full_iteration", f"{MEGATRON}.moe_router_fusion"
ETP, FLEX = f"{MEGATRON}.expert_tensor_parallel_size", f"{MEGATRON}.moe_token_dispatcher_type=flex"
LOW = f"{OPTIMIZER}.use_precision_aware_optimizer=true"
CHUNKS = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
OVERRIDES = f"{MEGATRON}.model_overrides"
PARTS = (
    f"{MEGATRON}.activation_checkpointing=true {MEGATRON}.recompute_granularity=selective {MEGATRON}.recompute_modules"
)
SHARED = "policy.sequence_packing.shared_prompts"
BATCH, TYPE, RATIO = "policy.train_global_batch_size", f"{LOSS}.truncated_importance_sampling_type", "sampling_ratio"
IS = f"{LOSS}.use_importance_sampling_correction=true"
KWARGS, LORA = "generation.vllm_kwargs", "generation.vllm_cfg.lora"
FILES = "data=file data.train_path=DATA data.validation_path=DATA"
TAUGHT = "algorithm=distillation teacher.model_name=embedded:reverse-digits"
OF_MATH = "data.sources.math.teacher.model_name"
JUDGE = "reward=judge reward.kwargs.base_url=http://localhost:8000/v1 reward.kwargs.model=m"
SHORT = "policy.max_total_sequence_length=64 generation.max_new_tokens=16"
GPU = f"cluster.gpus_per_node=1 policy=megatron_gpu generation=transformers {SHORT}"
VLLM = f"cluster.gpus_per_node=1 policy=megatron_gpu generation=vllm_gpu {SHORT}"
TARGETS = f"{PEFT}.enabled=true {PEFT}.target_modules"
SERVED = f"{VLLM} {PEFT}.enabled=true {LORA}=adapters"

# Arguments -> the key that the message names. Words in capitals are files of `places`.
CASES = {
    # Keys, groups, files, references, types.
    f"{MEGATRON}.optimizr.lr=1": f"{OPTIMIZER}.lr",
    "grpo.num_prompt_per_step=4": "algorithm.num_prompts_per_step",
    "generation.stop_strings=END": "generation.stop_strings=[END]",
    "completely.unheard.of=1": "completely.unheard.of",
    "polcy=megatron": "policy",
    "generation=sglang": "vllm",
    "policy.precision='${nope}'": "policy.precision",
    "run_name='???'": "run_name",
    "just-a-word": "just-a-word",
    "~policy.precision": "policy.precision",
    "policy.precision=[": "policy.precision",
    "algorithm.seed=1.5": "algorithm.seed",
    "generation.top_p=0": "generation.top_p",
    "policy.megatron_cfg=null": "policy.megatron_cfg",
    "algorithm=sft algorithm.num_prompts_per_step=4": "algorithm=grpo",
    "algorithm=GRPO": "did you mean algorithm=grpo?",
    "data=openai/gsm8k": "data=hub data.path=openai/gsm8k",
    "algorithm.name=sft": "algorithm=sft",
    "algorithm=sftt": "algorithm=sft",
    # Ranks, and the model that they share.
    "cluster.num_nodes=2": "cluster.cpu_ranks",
    "cluster.gpus_per_node=1 policy=megatron": "policy.precision",
    "cluster.gpus_per_node=1 generation.colocated.enabled=false": "generation.colocated.resources.gpus_per_node",
    f"{TP}=2": TP,
    f"{TP}=4 cluster.cpu_ranks=4": "2 key/value heads",
    f"{PP}=3 cluster.cpu_ranks=3": f"{LAST_STAGE}=2",
    f"cluster.cpu_ranks=3 {PP}=3 {LAST_STAGE}=1": LAST_STAGE,
    f"cluster.cpu_ranks=2 {PP}=2 {CHUNKS}=3": "one of [1, 2]",
    f"cluster.gpus_per_node=3 policy=megatron_gpu {CP}=2": CP,
    f"cluster.cpu_ranks=2 {CP}=2": CP,
    f"cluster.gpus_per_node=2 policy=megatron_gpu {CP}=2 policy.dynamic_batching.enabled=true": CP,
    f"cluster.gpus_per_node=2 policy=megatron_gpu {CP}=2 {SHARED}=true": SHARED,
    f"{VLLM} cluster.gpus_per_node=2 {CP}=2 {HYBRID}=true {MEGATRON}.moe_router_bias_update_rate=0.1": HYBRID,
    f"{GPU} {GRAPHS} {SHARED}=true": SHARED,
    # Fields of Megatron's own.
    f"{OVERRIDES}.attention_dropot=0.1": "did you mean attention_dropout",
    f"{OVERRIDES}.attention_dropout=much": f"{OVERRIDES}.attention_dropout",
    f"{OVERRIDES}.attention_backend=flash": "a type that a configuration cannot express",
    f"{OVERRIDES}.pipeline_model_parallel_size=2": f"set {PP} instead",
    f"{OVERRIDES}.params_dtype=bfloat16": "set policy.precision instead",
    f"{OVERRIDES}.enable_cuda_graph=true": f"set {MEGATRON}.cuda_graph_impl instead",
    f"{OVERRIDES}.hidden_size=128": "config.json",
    f"{OVERRIDES}.fp4_param=true": "weights that are not quantized",
    f"{MEGATRON}.recompute_modules=[attention]": f"{MEGATRON}.recompute_modules",
    f"{PARTS}=[core_attn,moe_act]": f"{MEGATRON}.recompute_modules=[core_attn]",
    f"cluster.cpu_ranks=2 {ETP}=4": ETP,
    f"{VLLM} cluster.gpus_per_node=5 {ETP}=5 policy.model_name=MOE": "width of the model's experts",
    f"{VLLM} policy.model_name=MOE cluster.gpus_per_node=2 {EP}=2 {FLEX}": f"{MEGATRON}.moe_router_dtype=fp32",
    f"{VLLM} policy.model_name=MOE {FLEX} {MEGATRON}.moe_router_dtype=fp32": "needs experts on several ranks",
    f"{GPU} {MEGATRON}.fp8_cfg.enabled=true policy.sequence_packing.enabled=false": "packed or dynamic batches",
    f"{GPU} {LOW} {OPTIMIZER}.optimizer=sgd {OPTIMIZER}.use_distributed_optimizer=false": "needs adam",
    f"{GPU} {LOW} {OPTIMIZER}.use_distributed_optimizer=false": "needs a sharded optimizer",
    f"{GPU} {GRAPHS} {MEGATRON}.fp8_cfg.enabled=true": f"{MEGATRON}.fp8_cfg.enabled=false",
    f"{PARTS}=[shared_experts]": f"{MEGATRON}.recompute_granularity=full",
    f"{VLLM} policy.model_name=MOE cluster.gpus_per_node=8 {CP}=8 {MEGATRON}.cp_comm_type=a2a": "cp_comm_type",
    f"{MEGATRON}.sequence_parallel=true {TP}=2 cluster.cpu_ranks=2": f"{MEGATRON}.sequence_parallel",
    f"{VLLM} policy.model_name=MOE cluster.gpus_per_node=8 {TP}=2": f"{MEGATRON}.sequence_parallel=true",
    f"{EP}=2": EP,
    f"{VLLM} policy.model_name=MOE cluster.gpus_per_node=16 {EP}=16": "8 experts",
    "policy.router_replay.enabled=true": "policy.router_replay.enabled",
    f"{GPU} policy.model_name=MOE {FUSION}=true": FUSION,
    "policy.max_total_sequence_length=4096": "policy.max_total_sequence_length",
    "policy.model_name=MODEL": "head_dim",
    "policy.model_name=MODEL generation=transformers generation.stop_token_ids=[999]": "generation.stop_token_ids",
    "policy.model_name=QUANTIZED": "policy.model_name",
    "policy.model_name=CLASSIFIER": "policy.model_name",
    "policy.model_name=PICKLED": "safetensors",
    "policy.model_name=EMPTY": "config.json",
    "recipes=grpo-smollm2-135m-1n1g": "get_smollm2.py",
    "policy.tokenizer.chat_template=none.jinja": "policy.tokenizer.chat_template",
    # Batches and the optimizer.
    "policy.train_global_batch_size=100": f"{BATCH}=128",
    "policy.logprob_batch_size=48": "policy.logprob_batch_size",
    "cluster.cpu_ranks=3": BATCH,
    "cluster.gpus_per_node=1 policy=megatron policy.sequence_packing.enabled=true": "policy.sequence_packing.enabled",
    "policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens=16": "train_mb_tokens=32",
    "algorithm=dpo policy.dynamic_batching.enabled=true policy.dynamic_batching.train_mb_tokens=40": "mb_tokens=64",
    f"{OPTIMIZER}.optimizer=sgd": f"{OPTIMIZER}.use_distributed_optimizer",
    f"{OPTIMIZER}.min_lr=1": f"{OPTIMIZER}.min_lr",
    f"{SCHEDULER}.lr_decay_style=cosine {SCHEDULER}.lr_warmup_iters=1000": f"{SCHEDULER}.lr_warmup_iters",
    f"cluster.cpu_ranks=2 {DDP}.overlap_param_gather=true {DDP}.overlap_grad_reduce=false": "needs overlap_grad_reduce",
    # Offload, adapters and graphs.
    "offload=cpu_optimizer": f"{OPTIMIZER}.optimizer_cpu_offload",
    f"{GPU} offload=cpu_optimizer {OPTIMIZER}.use_distributed_optimizer=false": "use_distributed_optimizer=true",
    "offload=activations": ACTIVATIONS,
    f"{GPU} {ACTIVATIONS}=true {MODULES}=[core_attn,moe_act]": MODULES,
    f"{GPU} policy.model_name=MOE {ACTIVATIONS}=true {MODULES}=[attn_norm]": MODULES,
    f"{GPU} policy.model_name=MOE {ACTIVATIONS}=true {MODULES}=[fused_group_mlp,moe_act]": "=[fused_group_mlp]",
    f"{GPU} policy.model_name=MOE cluster.gpus_per_node=3 {PP}=3 policy.train_global_batch_size=96 "
    f"{ACTIVATIONS}=true {MODULES}=[core_attn,qkv_linear]": f"{MODULES}=[core_attn]",
    f"{GPU} {PEFT}.enabled=true {ACTIVATIONS}=true {MODULES}=[core_attn]": ACTIVATIONS,
    f"cluster.cpu_ranks=2 {TP}=2 {PEFT}.enabled=true {PEFT}.dim=3": f"{PEFT}.dim=4",
    f"{PEFT}.enabled=true {EP}=2 cluster.cpu_ranks=2": f"{PEFT}.enabled",
    f"policy.model_name=LATENT {TARGETS}=[linear_qkv,linear_proj]": "no linear_qkv; its linear layers are linear_q_",
    f"policy.model_name=MODEL {TARGETS}=[linear_q_proj]": "no linear_q_proj; its linear layers are linear_qkv, linear",
    f"{SERVED} {PEFT}.dim=513": f"{PEFT}.dim",
    f"{SERVED} policy.model_name=MOE": LORA,
    f"{SERVED} +{KWARGS}.load_format=dummy": f"{KWARGS}.load_format",
    f"{GPU} cluster.gpus_per_node=2 {GRAPHS} {TP}=2": TP,
    f"{GPU} {GRAPHS} policy.sequence_packing.enabled=false": "policy.sequence_packing.enabled=true",
    f"{GPU} {GRAPHS} policy.model_name=MOE": "experts",
    f"{VLLM} {GRAPHS} policy.offload_for_generation=[gradients]": "policy.offload_for_generation",
    # Losses and the options of algorithms.
    f"{LOSS}.sequence_level_importance_ratios=true": f"{LOSS}.token_level_loss=false",
    f"{IS} {TYPE}=icepop": TYPE,
    f"generation.top_p=0.9 {LOSS}.sequence_rejection_ratio=1.01": "generation.top_p=1.0",
    f"generation.top_k=20 {LOSS}.sequence_rejection_ratio_min=0.99": "generation.top_k=null",
    f"generation.min_p=0.1 {LOSS}.sequence_rejection_ratio_min=0.99": "generation.min_p=0.0",
    "generation.min_p=0.1 generation.speculation=ngram": "generation.min_p=0.0, or generation.speculation=null",
    f"generation.min_p=0.1 +{KWARGS}.speculative_config.method=ngram": f"{KWARGS}.speculative_config=null",
    f"algorithm.ref_model_sync_steps=5 {PEFT}.enabled=true": "algorithm.ref_model_sync_steps=null",
    "algorithm.pass_at_k=8": "algorithm.pass_at_k=4",
    "algorithm.pass_at_k=2 algorithm.normalize_rewards=parts": "algorithm.normalize_rewards=true",
    "algorithm.credit=turn algorithm.pass_at_k=2": "algorithm.pass_at_k=null",
    "algorithm.credit=turn algorithm.normalize_rewards=parts": "algorithm.normalize_rewards=true",
    "algorithm=gspo algorithm.credit=turn": f"{LOSS}.sequence_level_importance_ratios=token",
    "algorithm.use_leave_one_out_baseline=batch algorithm.normalize_rewards=mean": "algorithm.normalize_rewards=false",
    f"generation.top_k=20 {IS} {LOSS}.importance_sampling_correction_level=sequence "
    f"{LOSS}.truncated_importance_{RATIO}=2": "importance_sampling_correction_level=token",
    f"generation.top_p=0.9 {IS} {TYPE}=seq-mask-tis {LOSS}.truncated_importance_{RATIO}=1.01": f"{TYPE}=tis",
    f"{TAUGHT} {LOSS}.sequence_level_importance_ratios=true {LOSS}.token_level_loss=false": "importance_ratios=token",
    f"{IS} {LOSS}.importance_sampling_correction_level=sequence": f"{LOSS}.truncated_importance_{RATIO}=2",
    f"algorithm=gspo {IS}": f"{LOSS}.truncated_importance_{RATIO}=2",
    f"{IS} {LOSS}.sequence_level_importance_ratios=token": f"{LOSS}.truncated_importance_{RATIO}=2",
    f"algorithm=gspo {IS} {TYPE}=icepop {LOSS}.truncated_importance_{RATIO}_min=0.5": f"truncated_importance_{RATIO}=2",
    f"{LOSS}.policy_loss=kl_cov {LOSS}.use_kl_in_reward=true": f"{LOSS}.use_kl_in_reward",
    f"{LOSS}.force_on_policy_ratio=true policy.train_global_batch_size=32": f"{LOSS}.force_on_policy_ratio",
    f"{LOSS}.force_on_policy_ratio=true {BATCH}=512 algorithm.num_iterations=2": "algorithm.num_iterations=1",
    "algorithm.rollouts.source=one_step_off": "algorithm.rollouts.source",
    f"{VLLM} algorithm.rollouts.source=one_step_off generation.colocated.sleep=true": "source=queue",
    "algorithm.rollouts.source=queue algorithm.rollouts.in_flight_weight_updates=false "
    "generation.colocated.sleep=true": "algorithm.rollouts.in_flight_weight_updates=true",
    "algorithm.use_leave_one_out_baseline=batch": "algorithm.normalize_rewards",
    "algorithm.reward_shaping.overlong_buffer_length=9": "algorithm.reward_shaping.overlong_buffer_length",
    "algorithm.val_metric=pass_at_k": "algorithm.val_samples_per_problem=4",
    "algorithm.higher_is_better=true algorithm=sft": "algorithm.higher_is_better",
    "algorithm=dpo algorithm.preference_loss=exo_pair": "algorithm.label_smoothing",
    "algorithm=dpo algorithm.preference_loss=apo_zero algorithm.f_divergence=forward_kl": "algorithm.f_divergence",
    "algorithm=kto policy.train_global_batch_size=1": BATCH,
    "algorithm=sft algorithm.max_num_steps=null": "algorithm.max_num_steps",
    "algorithm.loss=no_such_package.Loss": "algorithm.loss",
    "algorithm.loss=torn.py:Loss": "torn.py, line 2",
    "algorithm.loss=tests.unit.validation.losses.Unheard": "algorithm.loss",
    "algorithm.loss=tests.unit.validation.losses.Exits": "SystemExit",
    "algorithm.loss=tests.unit.validation.losses.Text": "needs",
    "algorithm.loss=tests.unit.validation.losses.Topk +algorithm.loss_kwargs.topk=0": "topk",
    "algorithm.loss=tests.unit.validation.losses.OfTeacher": "algorithm.topk_logits_k=64",
    "algorithm.loss=nemo_rl_lite.losses.supervised.DPOLoss": "needs DPOConfig",
    "agent=codex agent.kwargs.command=[codex,exec]": "agent.kwargs.command",
    "agent=codex agent.kwargs.command='\\''": "agent.kwargs.command",
    "agent=codex agent.kwargs.command=null": "agent.kwargs.command",
    "checkpoint.push_to_hub=true": "checkpoint.push_to_hub=my-name/my-model, or null",
    # A teacher.
    "algorithm=distillation": "teacher.model_name",
    f"{TAUGHT} cluster.cpu_ranks=2 teacher.megatron_cfg.tensor_model_parallel_size=4": "teacher.megatron_cfg.tensor_mo",
    f"{TAUGHT} policy.sequence_packing.enabled=true teacher.logprob_mb_tokens=16": "teacher.logprob_mb_tokens=32",
    f"{TAUGHT} algorithm.topk_logits_k=1000": "algorithm.topk_logits_k",
    "algorithm=distillation teacher.model_name=MODEL algorithm.topk_logits_k=8": "teacher.model_name",
    f"{TAUGHT} {OF_MATH}=/gone": f"{OF_MATH} = '/gone'",
    "data.sources={a:{weight:{step:{}}}}": "1. data.sources.a.weight",
    "data.sources.a.weight={0:0,100:1}": "data.sources.a.weight.step={0:1.0,100:0.2}",
    "data.sources=gsm8k": "1. data.sources = 'gsm8k'",
    "data.sources.a=gsm8k": "data.sources.a.NAME=...",
    "data.sources.a.reward=3": "data.sources.a.reward.NAME=...",
    "data.sources.a.weight=high": "data.sources.a.weight = 'high'",
    "data.sources.a.weight=0": "data.sources",
    "data.sources.a.rewards.name=math": "did you mean data.sources.a.reward?",
    "data.sources.a.data.name=math": "data.sources.a.KEY",
    f"algorithm=distillation {OF_MATH}=embedded:reverse-digits data.sources.code.weight=1": "1. teacher.model_name",
    f"{TAUGHT} data.sources.math.teacher.precision=float32": "data.sources.math.teacher.precision",
    f"{TAUGHT} algorithm.topk_logits_k=8 {OF_MATH}=MODEL": OF_MATH,
    f"{OF_MATH}=embedded:reverse-digits": OF_MATH,
    f"{TAUGHT} {LOSS}.policy_loss=clip_cov": f"{LOSS}.policy_loss",
    # Data.
    "data.name=squad": "data.name",
    "data=hub data.path=''": "data.path",
    "data=reverse_digits data.train_path=DATA": "data=file",
    "data.prompt_template='{prompt'": "data.prompt_template",
    "data.system_prompt=system.txt": "data.system_prompt",
    "data.answer_pattern='a'": "data.answer_pattern",
    "data.too_long=truncate": "data.too_long",
    f"{FILES} data.prompt_column=answer": "data.prompt_column",
    f"{FILES} data.prompt_template='{{prompt}} {{answer}}'": "data.prompt_template",
    f"{FILES} data.answer_column=solution": "data.answer_column",
    f"{FILES} data.validation_fraction=0.1": "data.validation_fraction",
    "data=file data.train_path=DATA data.validation_fraction=0": "data.validation_path",
    "data=file data.train_path=BROKEN data.validation_path=DATA": "row 2",
    "data=file data.train_path=ZIPPED data.validation_path=DATA": "data.train_path",
    "data=file data.train_path=rows.csv data.validation_path=DATA": "data.train_path",
    "data=reasoning_gym data.task=chain_sums": "chain_sum",
    "+data.task_kwargs.digits=5": "data.task_kwargs",
    "algorithm=dpo data=reasoning_gym data.task=chain_sum data.validation_fraction=0.1": "data.name",
    # Rewards, environments, agents.
    "reward.name=vibes": "reward.name",
    "reward.name=torn.score": "reward.name",
    "reward.name=gone.py:score": "reward.name",
    "reward.name=tests.unit.validation.own.of_verl": "function(response, answer",
    "reward.name=tests.unit.validation.own.score +reward.kwargs.limit=3": "reward.kwargs",
    "reward.name=tests.unit.exits.package.score": "SystemExit",
    "+reward.terms.exact_match.name=exact_match +reward.terms.exact_match.weight=1": "reward.terms.exact_match",
    "reward=judge": "reward.kwargs.base_url",
    f"{JUDGE} +reward.kwargs.api_key=sk-1": "reward.kwargs.api_key_env",
    "reward=none": "algorithm.name",
    "reward=reasoning_gym": "reward.name",
    f"{FILES} data.answer_column=null": "data.answer_column",
    "environment.name=chess": "environment.name",
    "environment.name=no_such_package.Game": "environment.name",
    "environment=calculator environment.max_turns=1": "environment.max_turns",
    "agent.name=player": "agent.name",
    "agent.name=tests.unit.validation.own.plays environment=calculator": "agent.name",
    # Engines.
    "generation.vllm_cfg.tensor_parallel_size=2": "generation.data_parallel_size",
    "cluster.gpus_per_node=4 generation.vllm_cfg.tensor_parallel_size=3": "generation.vllm_cfg.tensor_parallel_size",
    "generation.vllm_cfg.pipeline_parallel_size=2": "generation.vllm_cfg.pipeline_parallel_size",
    f"cluster.num_nodes=3 {VLLM} cluster.gpus_per_node=2 generation.vllm_cfg.tensor_parallel_size=4": "[1, 2, 6]",
    f"{VLLM} policy.model_name=MODEL generation.vllm_cfg.pipeline_parallel_size=64": "divide the 1 generation",
    f"{VLLM} cluster.gpus_per_node=2 policy.model_name=MOE policy.router_replay.enabled=true "
    "generation.vllm_cfg.pipeline_parallel_size=2": "must be 1 with router replay",
    "policy.model_name=MOE policy.router_replay.enabled=true generation=transformers": "policy.router_replay.enabled",
    "generation.serve.enabled=true generation.serve.host=http://here": "generation.serve.host",
    "generation.temperature=2.5": "generation.temperature",
    "generation.max_new_tokens=32": "policy.max_total_sequence_length=64",
    f"+{KWARGS}.dtype=half": "policy.precision",
    "generation.speculation=eagle3": "generation.draft_model=FOLDER",
    "generation.speculation=eagle3 generation.draft_model=./nowhere": "no such folder",
    "generation.speculation=draft_model generation.draft_model=EMPTY": "no config.json",
    "policy.model_name=MODEL generation.speculation=draft_model generation.draft_model=MOE": "vocab_size is 128",
    "generation.speculation=eagle3 generation.draft_model=MODEL": "hidden_size is 96, and that of the policy is 128",
    "policy.model_name=MODEL generation.speculation=mtp": "generation.speculation=ngram",
    f"+{KWARGS}.speculative_config={{method:eagle,model:./nowhere}}": f"{KWARGS}.speculative_config.model",
    f"+{KWARGS}.quantization=awq": f"{KWARGS}.quantization",
    f"{VLLM} policy.model_name=MODEL +{KWARGS}.quantization=fp8_per_block": "fp8_per_channel",
    "logger.wandb_enabled=true": "logger.wandb.mode",
}


@pytest.fixture
def places(tmp_path, monkeypatch) -> dict[str, str]:
    """Files that the cases name by a capital word."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    experts = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8, "vocab_size": 128}
    changes = {"MODEL": {}, "MOE": experts, "QUANTIZED": {"quantization_config": {"quant_method": "fp8"}}}
    changes |= {"LATENT": LATENT, "CLASSIFIER": {"architectures": ["LlamaForSequenceClassification"]}, "PICKLED": {}}
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(MODEL | change))
        (tmp_path / name / "tokenizer_config.json").write_text("{}")
        (tmp_path / name / ("pytorch_model.bin" if name == "PICKLED" else "model.safetensors")).write_bytes(b"")
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "torn.py").write_text("import os\ndef score(:\n")
    row = json.dumps({"prompt": "2+2", "answer": "4"})
    (tmp_path / "DATA.jsonl").write_text(row)
    (tmp_path / "BROKEN.jsonl").write_text(f"{row}\n{{")
    (tmp_path / "ZIPPED.jsonl").write_bytes(gzip.compress(row.encode()))
    return {file.stem: str(file) for file in tmp_path.iterdir()}


def problems(arguments: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose_config(arguments)
    assert all(one.fix for one in caught.value.violations)
    return caught.value


@pytest.mark.parametrize("targets", ["[]", "[linear_qkv,linear_proj,linear_fc1,linear_fc2]", "[linear_kv_up_proj]"])
def test_adapters_of_latent_attention(targets, places):
    """megatron-bridge's default, which names a layer that the model does not have, means all layers."""
    compose_config([f"policy.model_name={places['LATENT']}", *f"{TARGETS}={targets}".split()])


@pytest.mark.parametrize("arguments", CASES)
def test_a_bad_command(arguments, places):
    words = [_place(word, places) for word in split(arguments)]
    assert CASES[arguments] in str(problems(words))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("generation.temperature=2.5", "generation.temperature"),
        ("generation.temperature=-1", "generation.temperature"),
        ("generation.max_new_tokens=0", "generation.max_new_tokens"),
        ("algorithm.num_generations_per_prompt=1", "algorithm.num_generations_per_prompt"),
        ("reward.name=tests.unit.validation.own.score algorithm.seed=abc", "algorithm.seed"),
        ("data=file data.train_path=5 data.validation_fraction=0.1", "data.train_path"),
    ],
)
def test_what_follows_from_a_problem_is_no_second_one(arguments, key):
    assert [one.key for one in problems(arguments.split()).violations] == [key]


def test_an_engine_on_cpus_needs_a_build_for_them(monkeypatch):
    monkeypatch.setattr(engines, "is_cpu_build", lambda library: False)
    (broken,) = problems([]).violations
    assert broken.key == "generation.backend" and "runs on GPUs only" in broken.rule
    for others in ("cluster.gpus_per_node=1", "generation=transformers", "algorithm=sft"):
        compose_config([others])


@pytest.mark.parametrize("own", ["2.12.0", "2.14.0", None])
def test_fused_experts_need_a_newer_transformer_engine(own, places, monkeypatch):
    monkeypatch.setattr(layout, "installed", lambda library: own)
    arguments = [
        *GPU.split(),
        f"policy.model_name={places['MOE']}",
        f"{ACTIVATIONS}=true",
        f"{MODULES}=[fused_group_mlp]",
    ]
    if own == "2.12.0":
        assert f"{MODULES}=[expert_fc1,moe_act]" in str(problems(arguments))
    else:
        assert compose_config(arguments).policy.megatron_cfg.offload_modules == ["fused_group_mlp"]


def answers(folder, *given) -> list[str]:
    """Return the arguments of a file with these answers."""
    file = folder / "answers.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": str(number), "answer": one}) + "\n" for number, one in enumerate(given))
    )
    return ["data=file", f"data.train_path={file}", "data.validation_fraction=0.1", "reward.timeout_s=2"]


@pytest.mark.parametrize(
    ("reward", "given", "said"),
    [
        ("math", ["", "4"], "row 1: the reference answer '' is empty; 1 of the first 2 rows"),
        ("math", ["4", " $ $ "], "row 2: the reference answer ' $ $ ' is empty"),
        ("last_number", ["4", "four", "x", "5"], "row 2: the reference answer 'four' is not a number; 2 of"),
    ],
)
def test_answers_that_equal_no_response(reward, given, said, tmp_path):
    (found,) = problems([*answers(tmp_path, *given), f"reward={reward}"]).violations
    assert found.key == "reward.name" and said in found.rule and "data.answer_pattern" in found.fix


def test_a_few_answers_that_equal_no_response_are_a_warning(tmp_path, caplog):
    compose_config([*answers(tmp_path, "", "1", "2", "3", "4"), "reward=math"])
    assert "row 1: the reference answer '' is empty; 1 of the first 5 rows" in caplog.text


@pytest.mark.parametrize("reward", ["math", "exact_match", "last_number"])
def test_answers_of_every_form_are_accepted(reward, tmp_path, caplog):
    numbers = [5e-05, 1e16, "1,234", "3/4", "50%", "-5", "\N{MINUS SIGN}5", "1e5", "1 1/2"]
    others = ["12:00", "1/0", "x^2", "\\frac{1}{2", "(1,2)", "two words", "9^9^9^9", "so 3 * 4 = 12\n#### 12"]
    compose_config([*answers(tmp_path, *numbers, *(others if reward != "last_number" else [])), f"reward={reward}"])
    assert "equal" not in caplog.text


def test_everything_is_reported_at_once():
    bad = {
        "policy.lr": "1",
        "algorithm.seed": "abc",
        "generation.top_p": "2",
        "policy.logprob_batch_size": "48",
        "reward.name": "vibes",
        f"{OPTIMIZER}.min_lr": "1",
        "data.name": "squad",
    }
    found = problems([f"{key}={value}" for key, value in bad.items()])
    assert {one.key for one in found.violations} == {*bad}


def test_no_problem_hides_another(capsys, places):
    with pytest.raises(SystemExit) as exit_:
        train.main(["-m", "--wrong", "policy.lr=1", "algorithm.seed=1,abc", "generation.top_p=2,3"])
    told = capsys.readouterr().err
    assert exit_.value.code == 2 and "5 problems" in told
    for key in ("--wrong", "policy.lr", "algorithm.seed = 'abc'", "generation.top_p = 2", "generation.top_p = 3"):
        assert told.count(f". {key}") == 1


def test_a_wrong_key_and_a_wrong_folder_are_both_told(capsys, places):
    with pytest.raises(SystemExit):
        train.main(["policy.lr=1", f"hydra.run.dir={places['torn']}/run"])
    told = capsys.readouterr().err
    assert "policy.lr" in told and f"{places['torn']} is a file" in told


def test_a_users_code_is_imported():
    own = "tests.unit.validation.own"
    compose_config([f"reward.name={own}.score", "+reward.kwargs.volume=2.0", f"environment.name={own}.Game"])
    compose_config([f"reward.name={own}.many", "reward.batch_size=4", f"agent.name={own}.plays"])


@pytest.mark.parametrize(
    "words",
    [
        ["policy.lr=1e-4"],
        ["--dry-run", "recipes=grpo-smollm2-135m-1n1g"],
        ["recipes=grpo-tiny-1n1g"],
        ["-m", "algorithm.seed=1,abc"],
        ["-m", "algorithm.seed=3"],
        ["--learning-rate", "1e-5"],
        ["hydra.run.dir=s3://bucket/run"],
    ],
)
def test_the_command_line_ends_with_status_2(words, places, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_of_gpus", lambda *_: [])
    with pytest.raises(SystemExit) as exit_:
        train.main(words)
    captured = capsys.readouterr()
    assert exit_.value.code == 2 and captured.err.startswith("configuration error: ")
    assert "fix: " in captured.err and "Traceback" not in captured.err + captured.out
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:9"])
def test_an_address_of_ray_that_nothing_answers_at(address, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SystemExit) as exit_:
        train.main(["--dry-run"])
    assert exit_.value.code == 2 and "RAY_ADDRESS" in capsys.readouterr().err


COPIES = {
    "torchrun": {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8"},
    "srun": {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "2"},
}


@pytest.mark.parametrize("starter", COPIES)
def test_another_launcher_that_starts_the_command_several_times(starter):
    with pytest.raises(ConfigError, match=starter):
        check_single_launcher(COPIES[starter])


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        # A batch script, a job on one node, and the task that runs the command once Ray is on all nodes.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "RAY_ADDRESS": "10.0.0.1:6379"},
    ],
)
def test_a_command_that_is_started_once(environ):
    check_single_launcher(environ)


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (["hydra.run.dir="], "checkpoints"),
        (["hydra.run.dir="], "plots/new"),
        (["--dry-run", "hydra.run.dir="], "checkpoints/step-00000007"),
        # A run resumes in its own folder, where a sweep would put its jobs.
        (["--dry-run", "-m", "algorithm.seed=1,2", "hydra.sweep.dir="], "."),
    ],
)
def test_a_folder_inside_another_run(flags, place, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000007").mkdir(parents=True)
    (run / "command.txt").write_text("nrl-lite train\n")
    with pytest.raises(SystemExit) as exit_:
        train.main([*flags[:-1], f"{flags[-1]}{run / place}"])
    assert exit_.value.code == 2 and str(run) in capsys.readouterr().err and not (run / "plots").exists()


def split(arguments: str) -> list[str]:
    """Into words, at blanks that are not in quotes."""
    return re.split(r" (?![^']*'(?:[^']*'[^']*')*[^']*$)", arguments)


def _place(word: str, places: dict[str, str]) -> str:
    key, equals, value = word.partition("=")
    return f"{key}{equals}{places.get(value, value)}"
