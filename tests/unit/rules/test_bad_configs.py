"""Every mistake gets one readable message on the real command line: status 2, key and fix named, no traceback."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from nemo_rl_lite import train
from nemo_rl_lite.host.copies import check_single_launcher

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
OPTIMIZER, SCHEDULER = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
FIRST_STAGE, LAST_STAGE = (f"policy.megatron_cfg.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
TP, PP = "policy.megatron_cfg.tensor_model_parallel_size", "policy.megatron_cfg.pipeline_model_parallel_size"
DDP = "policy.megatron_cfg.distributed_data_parallel_config"
CP, CP_TYPE = "policy.megatron_cfg.context_parallel_size", "policy.megatron_cfg.cp_comm_type"
LOSS = "algorithm.loss_fn"
IS, TYPE = f"{LOSS}.use_importance_sampling_correction=true", f"{LOSS}.truncated_importance_sampling_type"
RATIO, LEVEL = f"{LOSS}.truncated_importance_sampling_ratio", f"{LOSS}.importance_sampling_correction_level"
OF_THE_STEP = "algorithm.use_leave_one_out_baseline=batch algorithm.normalize_rewards=advantages"
REJECTION = f"{LOSS}.sequence_rejection_ratio"
PEFT, EXPERTS = "policy.megatron_cfg.peft", "policy.megatron_cfg.expert_model_parallel_size"
ACTIVATIONS = "policy.megatron_cfg.fine_grained_activation_offloading"
MODULES = "policy.megatron_cfg.offload_modules"
SHARE = "policy.megatron_cfg.activation_offload_fraction"
GRAPHS = "policy.megatron_cfg.cuda_graph_impl"
ROUTER_FUSION = "policy.megatron_cfg.moe_router_fusion"
JUDGE = "reward=judge reward.kwargs.base_url=http://localhost:8000/v1 reward.kwargs.model=m"
FILES = "data=file data.train_path=DATA data.validation_path=DATA"
OFF = "algorithm.val_at_start=false algorithm.val_at_end=false algorithm.val_period=0"
TAUGHT = "algorithm=distillation teacher.model_name=embedded:reverse-digits"
GPU = (
    "cluster.gpus_per_node=1 policy=megatron_gpu generation=transformers policy.max_total_sequence_length=64 "
    "generation.max_new_tokens=16"
)

ON_A_GPU = (
    "cluster.gpus_per_node=1 policy=megatron_gpu generation=vllm_gpu policy.max_total_sequence_length=64 "
    "generation.max_new_tokens=16"
)
SERVED = f"{ON_A_GPU} {PEFT}.enabled=true generation.vllm_cfg.lora=adapters"

# Arguments -> what the message must say: the key first, then words of the rule or the fix.
CASES = {
    # Unknown keys, groups and files: the nearest known one is named.
    "policy.megatron_cfg.optimizr.lr=1": ["policy.megatron_cfg.optimizr.lr", f"did you mean {OPTIMIZER}.lr"],
    "policy.lr=1e-4": ["policy.lr", f"did you mean {OPTIMIZER}.lr"],
    "policy.train_globl_batch_size=8": ["policy.train_globl_batch_size", "did you mean policy.train_global_batch_size"],
    "+policy.offload_optimizer_for_logprob=true": ["did you mean policy.offload_optimizer_states_for_logprob"],
    "grpo.num_prompts_per_step=4": ["grpo.num_prompts_per_step", "did you mean algorithm.num_prompts_per_step"],
    "loss_fn.ratio_clip_min=0.1": ["loss_fn.ratio_clip_min", f"did you mean {LOSS}.ratio_clip_min"],
    "generation.temprature=1": ["generation.temprature", "did you mean generation.temperature"],
    "seed=1": ["seed", "did you mean algorithm.seed"],
    "algorithm.beta=0.1": ["algorithm.beta", f"did you mean {LOSS}.reference_policy_kl_penalty?"],
    "algorithm.rollouts.source=one_step_off": [
        "algorithm.rollouts.source",
        f"fix: {LOSS}.use_importance_sampling_correction=true",
    ],
    "algorithm.rollouts.source=queue cluster.gpus_per_node=2 policy=megatron_gpu generation=vllm_gpu "
    "generation.colocated.sleep=true": [
        "fix: generation.colocated.enabled=false, or generation.colocated.sleep=false",
        f"fix: {LOSS}.use_importance_sampling_correction=true",
    ],
    "cluster.gpus_per_node=2 policy=megatron_gpu generation=vllm_gpu offload=pinned generation.colocated.sleep=false": [
        "policy.offload_for_generation",
        "generation.colocated.sleep is off",
    ],
    "generation=transformers generation.colocated.sleep=false": ["generation.colocated.sleep", "has no effect"],
    "policy.sequence_packing.train_mb_tokens=automatic": ["policy.sequence_packing.train_mb_tokens", "auto"],
    "policy.offload_for_generation=all": ["policy.offload_for_generation", "auto"],
    "algorithm.rollouts.max_trajectory_age_steps=3": ["has no effect", "algorithm.rollouts.source=queue"],
    "generation.vllm_cfg.recompute_kv_cache_after_weight_updates=true": [
        "has no effect",
        "in_flight_weight_updates=true",
    ],
    "algorithm.rollouts.max_trajectory_age_steps=0 algorithm.rollouts.source=queue": [
        "max_trajectory_age_steps = 0",
        "greater than or equal to 1",
    ],
    "algorithm=dpo algorithm.beta=0.1": ["did you mean algorithm.reference_policy_kl_penalty?"],
    f"{LOSS}.ratio_eps=0.2": [f"did you mean {LOSS}.ratio_clip_min and {LOSS}.ratio_clip_max?"],
    "data.max_response_length=64": ["data.max_response_length", "did you mean generation.max_new_tokens?"],
    "policy.dtensor_cfg.enabled=true": ["policy.dtensor_cfg.enabled", "megatron-core's", "policy.megatron_cfg"],
    "policy.generation.temperature=1": ["did you mean generation.temperature?"],
    "policy.generation.vllm_cfg.async_engine=true": ["the section is generation here"],
    "algorithm.max_num_steps=null": ["algorithm.max_num_steps = 'null'", "must be an integer"],
    "completely.unheard.of=1": ["completely.unheard.of", "unknown key", "--cfg job"],
    "polcy=megatron": ["polcy", "did you mean policy"],
    "policy=megatro": ["policy", "did you mean policy=megatron"],
    "generation=sglang": ["generation", "no such file", "transformers, vllm"],
    "recipes=nothing-like-this": ["recipes", "no such file"],
    "offload=pinned generation.colocated.enabled=false": ["policy.offload_for_generation", "policy's GPUs"],
    "algorithm=sft offload=pinned": ["policy.offload_for_generation", "sft generates nothing"],
    "policy.offload_for_generation=[parameters,parameters]": ["policy.offload_for_generation", "twice"],
    "policy.offload_for_generation=[weights]": ["policy.offload_for_generation", "parameters"],
    "offload=everything": ["offload", "logprob, max_memory, none"],
    "policy@other=megatron": ["gives a package"],
    # References that lead nowhere.
    "policy.precision='${nope}'": ["policy.precision", "cannot be resolved"],
    "run_name='${run_name}'": ["run_name", "cannot be resolved"],
    "run_name='???'": ["run_name", "has no value"],
    "reward.kwargs.x='${oc.env:NO_SUCH_VARIABLE}'": ["reward.kwargs.x", "cannot be resolved"],
    # Not overrides at all, or deletions.
    "just-a-word": ["just-a-word", "is not an override"],
    "policy.precision": ["policy.precision", "is not an override"],
    "policy.precision=[": ["is not an override"],
    "~policy.precision": ["policy.precision", "deletes a key"],
    # More than the machine or the model has.
    "cluster.threads_per_worker=10000": ["cluster.threads_per_worker", "this machine gives the run"],
    "generation.data_parallel_size=1000": ["generation.data_parallel_size", "this machine gives the run"],
    "generation.vllm_cfg.cpu_kv_cache_gib=100000": ["generation.vllm_cfg.cpu_kv_cache_gib", "the machine has"],
    f"policy.model_name=MODEL generation=transformers {PEFT}.enabled=true {PEFT}.dim=1000000": [
        f"{PEFT}.dim",
        "the model's 96 dimensions",
    ],
    "policy.model_name=MODEL generation=transformers generation.stop_token_ids=[999999]": [
        "generation.stop_token_ids",
        "the model has 90 tokens",
    ],
    f"{OPTIMIZER}.lr=1e30": [f"{OPTIMIZER}.lr", "less than or equal to 10"],
    "recipes=grpo-tiny-1n0g-cpu recipes=dpo-tiny-1n0g-cpu": ["recipes", "is chosen twice"],
    # Rewards and environments, without an import of them, and at once.
    "reward.name=tests.unit.rules.own.scor environment.name=tests.unit.rules.own.Gone environment.max_turns=2": [
        "2 problems",
        "has no scor; did you mean score?",
        "environment.name",
        "has no Gone",
    ],
    "reward.name=torn.score": ["reward.name", "torn.py, line 2"],
    "reward.name=tests.unit.rules.gone.score": ["reward.name", "there is no module tests.unit.rules.gone"],
    "+reward.terms.tags.name=format +reward.terms.tags.weight=1": ["reward.terms.tags.kwargs.pattern"],
    "+reward.terms.tags.name=last_number": ["reward.terms.tags.weight"],
    "+reward.terms.tags.name=last_number +reward.terms.tags.weight=0": ["reward.terms.tags.weight", "adds nothing"],
    "+reward.terms.exact_match.name=exact_match +reward.terms.exact_match.weight=1": ["the name of the main reward"],
    "+reward.terms.tags.name=no.such +reward.terms.tags.weight=1": ["reward.terms.tags.name", "no.such"],
    "reward.concurrency=9": ["reward.concurrency", "which take no time"],
    "reward.name=tests.unit.rules.own.of_trl": ["reward.name", "the signature of TRL's rewards"],
    "reward.name=tests.unit.rules.own.score +reward.kwargs.limit=3": ["reward.kwargs", "unexpected keyword"],
    "reward.name=tests.unit.rules.own.score algorithm.seed=abc": ["1 problem", "algorithm.seed"],
    "reward.name=tests.unit.rules.own.of_verl": ["reward.name", "the signature of verl's rewards"],
    "reward.name=tests.unit.rules.own.swapped": ["reward.name", "takes `answer` first"],
    "reward.name=tests.unit.rules.own.asked": ["reward.name", "takes `prompt` first"],
    "reward.name=tests.unit.rules.own:score": ["fix: reward.name=tests.unit.rules.own.score", "1 problem"],
    "reward.name=own.py": ["reward.name", "names a file, and no reward in it", "path/to/file.py:"],
    "reward.name=own.py:scor": ["own.py has no scor; did you mean score?"],
    "reward.name=own.py:of_trl": ["reward.name", "the signature of TRL's rewards"],
    "reward.name=own.py:score +reward.kwargs.limit=3": ["reward.kwargs", "unexpected keyword"],
    "reward.name=gone.py:score": ["reward.name", "there is no file", "gone.py"],
    "reward.name=torn.py:score": ["reward.name", "torn.py, line 2"],
    "algorithm.loss=gone.py:Loss": ["algorithm.loss", "there is no file", "gone.py"],
    "algorithm.loss=torn.py:Loss": ["algorithm.loss", "SyntaxError", "torn.py, line 2"],
    "algorithm.loss=losses.py:Gone": ["algorithm.loss", "losses.py has no Gone"],
    # Rewards of many responses, and judges.
    "reward.batch_size=4": ["reward.batch_size", "exact_match judges one response at a time"],
    "reward.name=tests.unit.rules.own.many": ["takes `responses`", "reward.batch_size=32"],
    "reward.name=tests.unit.rules.own.score reward.batch_size=4": ["reward.batch_size = 4", "takes one `response`"],
    "reward.name=tests.unit.rules.own.many reward.batch_size=4 +reward.kwargs.limit=3": [
        "reward.kwargs",
        "function(responses, answers, **reward.kwargs)",
    ],
    "reward.name=tests.unit.rules.own.of_trl reward.batch_size=4": ["def reward(responses, answers)"],
    "+reward.terms.own.name=tests.unit.rules.own.many +reward.terms.own.weight=1": ["reward.terms.own.batch_size=32"],
    "+reward.terms.tags.name=last_number +reward.terms.tags.weight=1 +reward.terms.tags.batch_size=8": [
        "reward.terms.tags.batch_size",
        "last_number judges one",
    ],
    "reward=judge": ["2 problems", "reward.kwargs.base_url", "has no value", "reward.kwargs.model"],
    f"{JUDGE} reward.kwargs.base_url=localhost:8000": ["reward.kwargs.base_url", "must be an address, such as http://"],
    f"{JUDGE} reward.kwargs.prompt=Hm": ["reward.kwargs.prompt", "with the field {response}"],
    f"{JUDGE} reward.kwargs.prompt='{{response.text}}'": ["reward.kwargs.prompt", "plain braces"],
    f"{JUDGE} reward.kwargs.score_pattern='('": ["reward.kwargs.score_pattern", "must be a regular expression"],
    f"{JUDGE} reward.kwargs.score_pattern='[0-9]'": ["reward.kwargs.score_pattern", "with one group"],
    f"{JUDGE} reward.kwargs.best=0": ["reward.kwargs", "best and worst are equal"],
    f"{JUDGE} reward.kwargs.seconds=0": ["reward.kwargs.seconds", "greater than 0"],
    f"{JUDGE} reward.kwargs.seconds=200": ["reward.timeout_s = 300", "its 3 tries", "reward.timeout_s=600"],
    f"{JUDGE} reward.kwargs.best=10 reward.timeout_s=null": ["reward.timeout_s", "a process of its own"],
    f"{JUDGE} +reward.kwargs.api_key=sk-1": ["reward.kwargs.api_key", "is a secret", "api_key_env=NAME_OF_A_VARIABLE"],
    f"{JUDGE} +reward.kwargs.temperature=1": ["reward.kwargs.temperature", "unknown key"],
    f"{JUDGE} reward.kwargs.best=10 reward.batch_size=4": ["judge judges one response at a time"],
    "+reward.terms.own.name=judge +reward.terms.own.weight=1": ["reward.terms.own.kwargs.base_url", "has no value"],
    "algorithm.oversample=2": ["algorithm.oversample", "algorithm.use_dynamic_sampling=true"],
    "algorithm.use_dynamic_sampling=true algorithm.oversample=4 algorithm.dynamic_sampling_max_gen_batches=2": [
        "algorithm.oversample=2 or less"
    ],
    "algorithm.reward_shaping.overlong_buffer_penalty=2": ["overlong_buffer_penalty", "overlong_buffer_length=N"],
    "algorithm.reward_shaping.overlong_buffer_length=9": [
        "overlong_buffer_length",
        "exceeds generation.max_new_tokens",
    ],
    "environment.concurrency=64": ["environment.concurrency", "has no effect"],
    "agent.timeout_s=5": ["agent.timeout_s", "has no effect", "agent.name=package.module.function"],
    "generation.serve.port=8000": ["generation.serve.port", "has no effect", "generation.serve.enabled=true"],
    "generation.serve.enabled=true generation.serve.port=70000": ["generation.serve.port", "less than 65536"],
    "agent.name=tests.unit.rules.own.plays environment=calculator": ["agent.name", "would answer in it"],
    "agent.name=tests.unit.rules.own.plays agent.concurrency=2": ["agent.processes", "agent.processes=2"],
    "agent.name=tests.unit.rules.own.acts": ["agent.name", "cannot be called as agent(problem, endpoint"],
    "agent.name=tests.unit.rules.own.plays +agent.kwargs.tol=1": ["unexpected keyword argument 'tol'"],
    "agent.name=tests.unit.rules.own.play": ["agent.name", "did you mean plays?"],
    "agent.name=own.py": ["agent.name", "names a file, and no agent in it: own.py:NAME"],
    "agent.name=nowhere/own.py:plays": ["agent.name", "nowhere/own.py"],
    "agent.name=player": ["agent.name", "no such agent", "async def agent(problem, endpoint"],
    "algorithm=sft agent.name=tests.unit.rules.own.plays": ["agent.name", "algorithm=grpo"],
    "environment.max_error_share=0": ["environment.max_error_share", "has no effect"],
    "environment=calculator environment.timeout_s=5": ["environment.timeout_s", "answers at once"],
    "environment=python environment.max_turns=1": ["environment.max_turns", "2 or more"],
    "environment=tools": ["environment.kwargs.tools", "environment=tools needs it", "my_package.search.search"],
    "environment=tools environment.kwargs.tools=search": ["must be a list of dotted paths"],
    "environment=tools environment.kwargs.tools=[tests.unit.rules.own.scor]": ["did you mean score?"],
    "environment=nemo_gym": ["environment.kwargs.url", "needs it", "http://localhost"],
    "environment=verifiers": ["environment.kwargs.environment", "needs it"],
    "data=file data.train_path=README.md data.tools_column=tools": ["data.tools_column", "nobody answers their calls"],
    "data.answer_column=null": ["data.answer_column", "reverse_digits needs answers"],
    "environment=calculator environment.max_turns=1": ["environment.max_turns", "2 or more"],
    "environment.name=tests.unit.rules.own.Closes environment.max_turns=2": ["environment.name", "called as close()"],
    "environment.name=tests.unit.rules.own.Fine environment.max_turns=2 environment.concurrency=2": [
        "environment.processes=2"
    ],
    "environment.name=tests.unit.rules.own.Mute environment.max_turns=2": ["environment.name", "no method step"],
    "environment.name=tests.unit.rules.own.Narrow environment.max_turns=2": ["environment.name", "too many positional"],
    "environment.name=tests.unit.rules.own.Static environment.max_turns=2": ["environment.name", "too many positional"],
    "environment.name=tests.unit.rules.own:Fits environment.max_turns=2": ["=tests.unit.rules.own.Fits"],
    "environment.name=own.py:Narrow environment.max_turns=2": ["environment.name", "too many positional"],
    "environment.name=gone.py:Fine environment.max_turns=2": ["environment.name", "there is no file"],
    "algorithm.loss=tests.unit.rules.losses.Exits": ["algorithm.loss = ", "cannot be made: SystemExit: 0"],
    "algorithm.loss=tests.unit.exits.Loss": ["algorithm.loss = ", "cannot be imported: SystemExit: 0"],
    "reward.name=tests.unit.exits.package.score": ["reward.name", "cannot be imported: SystemExit: 0"],
    "algorithm.loss=tests.unit.rules.losses.Summary": [
        "algorithm.loss",
        "has summarize = 'mean', which cannot be called",
    ],
    "algorithm.loss=tests.unit.rules.losses.Text": ["has needs = 'entropy', which is no tuple", "needs = ('entropy',)"],
    "algorithm.loss=tests.unit.rules.losses.Topk +algorithm.loss_kwargs.topk=0": ["no int `topk` above 0, but 0"],
    # Arguments of another type than the function says, or that leave a program nothing.
    "reward=program reward.kwargs.share=no": ["reward.kwargs.share = 'no'", "true or false", "share=false"],
    "reward=program reward.kwargs.memory_mib=1GiB": ["reward.kwargs.memory_mib = '1GiB'", "an integer", "1 problem"],
    "reward=program reward.kwargs.memory_mib=2": ["reward.kwargs.memory_mib", "is in MiB"],
    "reward=program reward.kwargs.seconds=null": ["reward.kwargs.seconds", "must be a number"],
    "reward=program reward.kwargs.seconds=-1": ["reward.kwargs.seconds", "no time"],
    "reward=program reward.timeout_s=5": [
        "reward.kwargs.seconds = 10.0",
        "reward.timeout_s = 5",
        "reward.timeout_s=60",
    ],
    "+reward.terms.p.name=program +reward.terms.p.weight=1 +reward.terms.p.kwargs.share=yes": [
        "reward.terms.p.kwargs.share",
        "share=true",
    ],
    "reward.name=tests.unit.rules.own.score reward.kwargs.volume=loud": ["reward.kwargs.volume", "must be a number"],
    "environment.name=tests.unit.rules.own.Sized environment.max_turns=2 environment.kwargs.size=big": [
        "environment.kwargs.size",
        "must be an integer or null, as Sized says",
    ],
    "algorithm=dpo algorithm.loss=tests.unit.rules.losses.Topk algorithm.loss_kwargs.topk=many": [
        "algorithm.loss_kwargs.topk",
        "must be an integer",
    ],
    "agent.name=tests.unit.rules.own.paced agent.kwargs.seconds=soon": ["agent.kwargs.seconds", "must be a number"],
    "reward=math reward.concurrency=64": ["reward.concurrency", "math is a plain function", "reward.processes"],
    "reward.name=math_verify.verify": ["reward.name", "takes `gold` first"],
    "reward.name=tests.unit.rules.own.gold_first": ["reward.name", "takes `reference` first"],
    "environment=python environment.kwargs.memory_mib=2": ["environment.kwargs.memory_mib", "is in MiB", "1 problem"],
    "environment=python environment.kwargs.seconds=600": [
        "environment.kwargs.seconds = 600",
        "environment.timeout_s = 60 ends all of them",
    ],
    "reward=format reward.kwargs.pattern='\\boxed\\{.*\\}'": ["reward.kwargs.pattern", "does not find \\boxed"],
    "reward=format reward.kwargs.pattern='\\\\d+'": ["reward.kwargs.pattern", "finds a backslash and d"],
    f"{FILES} data.answer_column=null": ["data.answer_column", "reward.name = exact_match compares", "1 problem"],
    f"{FILES} data.answer_column=null environment=python reward=math": ["reward.name = math compares"],
    "generation.serve.enabled=true generation.serve.host=localhost:8000": ["generation.serve.host", "without a port"],
    "generation.serve.enabled=true generation.serve.host=http://here": ["generation.serve.host", "without http://"],
    "+generation.vllm_kwargs.quantization=awq": [
        "generation.vllm_kwargs.quantization = 'awq'",
        "fp8_per_tensor, fp8_per_channel, fp8_per_block",
        "1 problem found",
    ],
    "+generation.vllm_kwargs.quantization=fp8_per_block": ["vLLM computes with FP8 weights on GPUs", "1 problem found"],
    f"{ON_A_GPU} policy.precision=float32 policy.sequence_packing.enabled=false "
    "+generation.vllm_kwargs.quantization=fp8_per_block": ["policy.precision", "needs bfloat16"],
    f"{ON_A_GPU} policy.model_name=QWEN_MOE +generation.vllm_kwargs.quantization=fp8_per_tensor": [
        "generation.vllm_kwargs.quantization",
        "quantised experts",
    ],
    f"{ON_A_GPU} policy.model_name=MODEL +generation.vllm_kwargs.quantization=fp8_per_block": [
        "generation.vllm_kwargs.quantization",
        "a multiple of 128 on each engine rank",
        "fp8_per_channel",
    ],
    "+generation.vllm_kwargs.hf_overrides={a:1}": ["generation.vllm_kwargs.hf_overrides", "another model"],
    "+generation.vllm_kwargs.enable_lora=true": ["generation.vllm_kwargs.enable_lora", "vllm_cfg.lora"],
    "+generation.vllm_kwargs.speculative_config=ngram": [
        "generation.vllm_kwargs.speculative_config",
        "must be a mapping",
        "{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 3}",
    ],
    "+generation.vllm_kwargs.speculative_config={method:eagle,num_speculative_tokens:3,prompt_lookup_max:3}": [
        "generation.vllm_kwargs.speculative_config.method = 'eagle'",
        "weights that no refit brings",
        "1 problem found",
    ],
    "+generation.vllm_kwargs.speculative_config={method:ngram,num_speculative_tokens:0}": [
        "speculative_config.num_speculative_tokens = 0",
        "speculative_config.prompt_lookup_max=3",
        "whole number above 0",
    ],
    "+generation.vllm_kwargs.speculative_config={method:ngram,num_speculative_tokens:3,prompt_lookup:3,"
    "prompt_lookup_max:3}": ["speculative_config.prompt_lookup", "did you mean prompt_lookup_", "1 problem found"],
    "+generation.vllm_kwargs.max_num_batched_tokens=8k": ["= '8k'", "must be an integer or null, as vLLM's EngineArgs"],
    # Models that cannot be trained.
    "policy.model_name=QUANTIZED": ["policy.model_name", "is quantized", "fp8", "the model that it was made from"],
    "policy.model_name=CLASSIFIER": ["policy.model_name", "names no causal language model", "ForCausalLM"],
    # Texts that were meant as something else.
    "generation.stop_strings=['a\\n']": ["generation.stop_strings", "a backslash and an n", "in bash, $'key="],
    "data.system_prompt=system.txt": ["data.system_prompt", "is the name of a file", "$(cat system.txt)"],
    "data.system_prompt='{instruction}'": ["data.system_prompt", "is one field", "data.prompt_template"],
    "algorithm.use_dynamic_sampling=true algorithm.dynamic_sampling_max_gen_batches=1.005": [
        "algorithm.dynamic_sampling_max_gen_batches",
        "replace none of its 64",
    ],
    "hydra.run.dir=s3://bucket/run": ["hydra.run.dir", "is an address", "1 problem"],
    "-m algorithm.seed=1,2 hydra.sweep.dir=s3://bucket/run": ["hydra.sweep.dir", "is an address"],
    # What another key switches off or contradicts.
    f"{GPU} offload=pinned policy.offload_for_generation=[]": ["offload = 'pinned'", "has no effect", "offload=none"],
    f"{GPU} offload=logprob policy.offload_optimizer_states_for_logprob=false": ["offload = 'logprob'", "1 problem"],
    f"algorithm=sft {OFF} policy.offload_optimizer_states_for_logprob=true": [
        "policy.offload_optimizer_states_for_logprob",
        "has no effect without logprobs or validations",
    ],
    "+generation.vllm_kwargs.pipeline_parallel_size=2": ["set generation.vllm_cfg.tensor_parallel_size instead"],
    "+generation.vllm_kwargs.data_parallel_size=2": ["set generation.data_parallel_size instead"],
    f"{GPU} policy.model_name=QWEN_MOE policy.megatron_cfg.moe_router_bias_update_rate=0.001": [
        "policy.megatron_cfg.moe_router_bias_update_rate",
        "routers have no biases",
    ],
    "logger.wandb_enabled=true logger.wandb.mode=offline logger.wandb.project=": [
        "logger.wandb.project",
        "not be empty",
    ],
    "logger.wandb.name=''": ["logger.wandb.name", "must not be empty"],
    "+reward.terms.x.name=format +reward.terms.x.weight=1 +reward.terms.x.pattern=a": [
        "reward.terms.x.pattern",
        "reward.terms.x.kwargs.pattern",
    ],
    "reward.terms=[{name:format}]": ["reward.terms", "is a section, and no list", "reward.terms.NAME"],
    "policy.megatron_cfg=[1]": ["policy.megatron_cfg", "is a section, and no list", "1 problem"],
    # Folders that cannot be written.
    "hydra.run.dir=''": ["hydra.run.dir", "is empty"],
    "hydra.run.dir=/proc/x": ["hydra.run.dir", "/proc cannot be written"],
    f"hydra.run.dir={__file__}": ["hydra.run.dir", "is a file"],
    # Wrong types and ranges.
    "algorithm.seed=abc": ["algorithm.seed", "must be an integer"],
    "algorithm.seed=-1": ["algorithm.seed", "greater than or equal to 0"],
    "algorithm.seed=4294967296": ["algorithm.seed", "less than 4294967296"],
    "algorithm.seed=1.5": ["algorithm.seed", "must be an integer"],
    "algorithm.max_num_steps=0": ["algorithm.max_num_steps", "greater than 0"],
    "algorithm.val_at_start=yep": ["algorithm.val_at_start", "must be true or false"],
    "algorithm.num_prompts_per_step=null": ["algorithm.num_prompts_per_step", "must be an integer"],
    "algorithm.val_temperature=-1": ["algorithm.val_temperature", "greater than or equal to 0"],
    f"{LOSS}.ratio_clip_min=1.5": [f"{LOSS}.ratio_clip_min", "less than or equal to 1"],
    f"{LOSS}.policy_loss=ppo": [f"{LOSS}.policy_loss", "'cispo', 'sapo' or 'reinforce'"],
    f"{LOSS}.clip_cov_ratio=0.1": [f"{LOSS}.clip_cov_ratio", f"{LOSS}.policy_loss=clip_cov"],
    f"{LOSS}.policy_loss=clip_cov {LOSS}.ppo_kl_coef=0.5": [f"{LOSS}.ppo_kl_coef", f"{LOSS}.policy_loss=kl_cov"],
    f"{LOSS}.policy_loss=clip_cov {LOSS}.clip_cov_lb=5": [f"{LOSS}.clip_cov_lb", "smaller than clip_cov_ub = 5"],
    f"{LOSS}.policy_loss=kl_cov {LOSS}.kl_cov_ratio=0": [f"{LOSS}.kl_cov_ratio", "greater than 0"],
    f"{LOSS}.policy_loss=kl_cov {LOSS}.ratio_clip_max=0.1": [f"{LOSS}.ratio_clip_max", f"{LOSS}.policy_loss=clip"],
    f"{LOSS}.top_entropy_quantile=1.5": [f"{LOSS}.top_entropy_quantile", "less than or equal to 1"],
    f"{LOSS}.positive_example_nll_weight=-1": [f"{LOSS}.positive_example_nll_weight", "greater than or equal to 0"],
    f"{LOSS}.token_level_loss=sum": [f"{LOSS}.token_level_loss", "constant"],
    f"{LOSS}.constant_length=1": [f"{LOSS}.constant_length", f"{LOSS}.token_level_loss=constant"],
    f"{LOSS}.token_level_loss=constant {LOSS}.constant_length=0": [f"{LOSS}.constant_length", "greater than 0"],
    f"{LOSS}.policy_loss=cispo {LOSS}.ratio_clip_c=3": [f"{LOSS}.ratio_clip_c", f"{LOSS}.policy_loss=clip"],
    f"{LOSS}.policy_loss=sapo {LOSS}.ratio_clip_max=0.1": [f"{LOSS}.ratio_clip_max", f"{LOSS}.policy_loss=clip"],
    f"{LOSS}.sapo_temperature_neg=2": [f"{LOSS}.sapo_temperature_neg", f"{LOSS}.policy_loss=sapo"],
    f"{LOSS}.policy_loss=sapo {LOSS}.sapo_temperature_pos=0": [f"{LOSS}.sapo_temperature_pos", "greater than 0"],
    f"{LOSS}.policy_loss=reinforce {LOSS}.sequence_level_importance_ratios=token": [
        f"{LOSS}.sequence_level_importance_ratios",
        "reinforce has no ratio",
    ],
    f"{LOSS}.entropy_coef=-0.1": [f"{LOSS}.entropy_coef", "greater than or equal to 0"],
    "algorithm.advantage_clip_low=0.5": ["algorithm.advantage_clip_low", "less than 0"],
    "algorithm.advantage_clip_high=0": ["algorithm.advantage_clip_high", "greater than 0"],
    "algorithm.normalize_rewards=parts": ["algorithm.normalize_rewards", "a reward of several terms", "reward.terms"],
    "algorithm.normalize_rewards=step": ["algorithm.normalize_rewards", "batch"],
    "algorithm.use_leave_one_out_baseline=batch": ["algorithm.normalize_rewards=advantages", "1 problem found"],
    f"{OF_THE_STEP} algorithm.use_dynamic_sampling=true": [
        "algorithm.use_dynamic_sampling",
        "teach with a baseline of the whole batch",
        "algorithm.use_leave_one_out_baseline=false",
        "1 problem found",
    ],
    f"{OF_THE_STEP} algorithm.rest_epochs=4": ["algorithm.rest_epochs=0"],
    "algorithm=dpo algorithm.preference_loss=hinge algorithm.label_smoothing=0.1": [
        "preference_loss=hinge has no such"
    ],
    "algorithm=dpo algorithm.preference_loss=exo_pair": ["algorithm.label_smoothing=1e-3"],
    "algorithm=dpo algorithm.preference_loss=apo_zero algorithm.f_divergence=forward_kl": [
        "algorithm.f_divergence",
        "algorithm.f_divergence=reverse_kl, or algorithm.preference_loss=dpo",
    ],
    "algorithm=kto policy.train_global_batch_size=1": ["policy.train_global_batch_size", "no other response"],
    "algorithm=kto algorithm.desirable_weight=0": ["algorithm.desirable_weight", "greater than 0"],
    "algorithm=kto algorithm.val_metric=accuracy": ["algorithm.val_metric", "'rewards_margin_mean'"],
    "algorithm=kto data=reasoning_gym data.task=chain_sum data.validation_fraction=0.1": [
        "data.name",
        "labelled responses need wrong ones",
    ],
    "algorithm=kto data.response_column=x": ["data.response_column", "has no such columns"],
    "algorithm=kto data=file data.train_path=x.jsonl data.chosen_column=x": ["data.chosen_column", "algorithm=orpo"],
    "algorithm=orpo data=file data.train_path=x.jsonl data.label_column=x": ["data.label_column", "algorithm=kto"],
    "algorithm=orpo algorithm.beta=0.1": ["algorithm.beta"],
    "algorithm=orpo algorithm.preference_loss_weight=0": ["algorithm.preference_loss_weight", "greater than 0"],
    "algorithm=dpo algorithm.f_alpha_divergence_coef=0.2": ["algorithm.f_divergence=alpha_divergence"],
    "algorithm=dpo algorithm.f_divergence=alpha_divergence algorithm.f_alpha_divergence_coef=2": [
        "algorithm.f_alpha_divergence_coef",
        "less than or equal to 1",
    ],
    "algorithm=dapo algorithm.max_num_epochs=2": [
        "is a key of algorithm=dpo and algorithm=kto and algorithm=orpo and algorithm=sft only"
    ],
    f"{LOSS}.ratio_clip_max=-0.1": [f"{LOSS}.ratio_clip_max", "greater than or equal to 0"],
    f"{LOSS}.reference_policy_kl_type=k4": [f"{LOSS}.reference_policy_kl_type", "'k1', 'k2' or 'k3'"],
    f"{LOSS}.reference_policy_kl_type=k1 {LOSS}.use_bias_correction_kl=false": [
        f"{LOSS}.use_bias_correction_kl",
        "averages to zero",
    ],
    f"{LOSS}.use_kl_in_reward=true {LOSS}.reference_policy_kl_penalty=0": [
        f"{LOSS}.use_kl_in_reward",
        "has no effect",
        f"{LOSS}.reference_policy_kl_penalty=0.01",
    ],
    f"algorithm=gspo {LOSS}.use_kl_in_reward=true {LOSS}.reference_policy_kl_penalty=0.01": [
        f"{LOSS}.use_kl_in_reward",
        "an advantage of its own",
        f"{LOSS}.sequence_level_importance_ratios=token",
    ],
    f"{LOSS}.policy_loss=kl_cov {LOSS}.use_kl_in_reward=true": [
        f"{LOSS}.use_kl_in_reward",
        "compares advantages before that",
        f"{LOSS}.policy_loss=clip",
    ],
    f"{LOSS}.use_kl_in_reward=true {LOSS}.use_bias_correction_kl=false": [
        f"{LOSS}.use_bias_correction_kl",
        "has no effect",
        "the KL has no gradient",
    ],
    "generation.temperature=2.5": ["generation.temperature", "takes 0.01 to 2"],
    "generation.temperature=0.005": ["generation.temperature", "generation.temperature=0.01"],
    "algorithm.val_temperature=3.0": ["algorithm.val_temperature", "algorithm.val_temperature=2"],
    "algorithm.val_samples_per_problem=0": ["algorithm.val_samples_per_problem", "greater than 0"],
    "algorithm.val_samples_per_problem=4 algorithm.val_temperature=0": [
        "algorithm.val_samples_per_problem",
        "all greedy responses to a problem are the same",
        "algorithm.val_samples_per_problem=1",
    ],
    f"{PEFT}.enabled=true {PEFT}.dropout=0.1": [f"{PEFT}.dropout", "computed without dropout"],
    "policy.megatron_cfg.freeze_moe_router=true": ["policy.megatron_cfg.freeze_moe_router", "no experts"],
    "policy.router_replay.enabled=true": ["policy.router_replay.enabled", "no experts", "enabled=false"],
    "policy.model_name=MOE policy.router_replay.enabled=true generation=transformers": [
        "policy.router_replay.enabled",
        "the transformers engine does not record",
        "generation=vllm",
    ],
    "policy.model_name=MOE algorithm=sft policy.router_replay.enabled=true": ["has no effect", "algorithm=grpo"],
    "policy.model_name=MOE +generation.vllm_kwargs.enable_return_routed_experts=true": [
        "is set by the launcher",
        "policy.router_replay.enabled",
    ],
    "policy.megatron_cfg.moe_router_dtype=fp64": ["moe_router_dtype", "no experts", "moe_router_dtype=null"],
    "policy.megatron_cfg.moe_router_bias_update_rate=0.1": ["moe_router_bias_update_rate", "rate=0.0"],
    "policy.megatron_cfg.moe_router_dtype=fp16": ["moe_router_dtype", "'fp32' or 'fp64'"],
    "reward.max_error_share=2": ["reward.max_error_share", "less than or equal to 1"],
    f"{LOSS}.reference_policy_kl_penalty=-0.1": [f"{LOSS}.reference_policy_kl_penalty"],
    f"{OPTIMIZER}.lr=fast": [f"{OPTIMIZER}.lr", "must be a number"],
    f"{OPTIMIZER}.lr=0": [f"{OPTIMIZER}.lr", "greater than 0"],
    f"{OPTIMIZER}.lr=inf": [f"{OPTIMIZER}.lr", "finite"],
    f"{OPTIMIZER}.adam_beta1=1": [f"{OPTIMIZER}.adam_beta1", "less than 1"],
    f"{OPTIMIZER}.optimizer=lion": [f"{OPTIMIZER}.optimizer", "'adam' or 'sgd'"],
    f"{SCHEDULER}.lr_decay_style=stairs": [f"{SCHEDULER}.lr_decay_style", "'cosine'"],
    "policy.precision=fp32": ["policy.precision", "'float32' or 'bfloat16'"],
    "policy.megatron_cfg=null": ["policy.megatron_cfg", "must be a mapping"],
    "policy.model_name=''": ["policy.model_name", "must not be empty"],
    "policy.max_grad_norm=0": ["policy.max_grad_norm", "greater than 0"],
    "policy.offload_optimizer_states_for_logprob=1": ["policy.offload_optimizer_states_for_logprob", "true or false"],
    "generation.top_p=0": ["generation.top_p", "greater than 0"],
    "generation.top_k=0": ["generation.top_k", "greater than 0"],
    "generation.temperature=0": ["generation.temperature", "greater than 0"],
    "generation.stop_token_ids=7": ["generation.stop_token_ids", "must be a list"],
    "generation.stop_token_ids=[a]": ["generation.stop_token_ids.0", "must be an integer"],
    "generation.vllm_cfg.gpu_memory_utilization=1.2": ["generation.vllm_cfg.gpu_memory_utilization"],
    "refit.bucket_bytes=0": ["refit.bucket_bytes", "greater than 0"],
    "refit.verify=sometimes": ["refit.verify", "'off', 'sample' or 'full'"],
    "refit.timeout_s=nan": ["refit.timeout_s", "finite"],
    "logger.show_samples_period=-1": ["logger.show_samples_period", "greater than or equal to 0"],
    "logger.log_samples=-1": ["logger.log_samples", "greater than or equal to 0"],
    "logger.mlflow.tracking_uri=''": ["logger.mlflow.tracking_uri", "must not be empty"],
    "profile.steps=[0]": ["profile.steps.0", "greater than 0"],
    "profile.steps=[3,99]": ["profile.steps", "step 99 is after the run's last", "steps from 1 to 30"],
    "profile.tool=perf": ["profile.tool", "'torch' or 'nsys'"],
    "logger.wandb.mode=quiet": ["logger.wandb.mode", "'online' or 'offline'"],
    "cluster.cpu_ranks=0": ["cluster.cpu_ranks", "greater than 0"],
    # Combinations.
    "policy.train_global_batch_size=100": ["1 problem", "512 samples (64 prompts x 8", "train_global_batch_size=128,"],
    "policy.logprob_batch_size=48": ["policy.logprob_batch_size", "512 samples"],
    "cluster.cpu_ranks=3": ["policy.train_global_batch_size", "data-parallel size (3)", "another number of ranks"],
    f"{TP}=2": [TP, "must divide the 1 policy ranks", "cluster.cpu_ranks=2"],
    f"{TP}=4 cluster.cpu_ranks=4": [TP, "2 key/value heads", "one of [1, 2]"],
    f"{PP}=3 cluster.cpu_ranks=3": [PP, "4 layers"],
    f"{TP}=2 cluster.cpu_ranks=2 policy.model_name=MODEL": [TP, "3 key/value heads", "one of [1, 3]"],
    "algorithm.num_generations_per_prompt=1": ["algorithm.num_generations_per_prompt", "at least 2"],
    f"{LOSS}.sequence_level_importance_ratios=true": [f"{LOSS}.token_level_loss=false"],
    f"{LOSS}.truncated_importance_sampling_ratio=2": ["use_importance_sampling_correction=true"],
    f"{LOSS}.use_importance_sampling_correction=true {LOSS}.truncated_importance_sampling_ratio=0.5": [
        f"{LOSS}.truncated_importance_sampling_ratio",
        "greater than or equal to 1",
    ],
    f"{IS} {RATIO}_min=1.5": [f"{RATIO}_min", "less than or equal to 1"],
    f"{IS} {RATIO}_min=1 {RATIO}=1": [f"{RATIO}_min", f"must be smaller than {RATIO} = 1"],
    f"{RATIO}_min=0.5": [f"{RATIO}_min", "limits a correction that is off", "1 problem found"],
    f"{IS} {TYPE}=mask": [TYPE, "'tis', 'icepop' or 'seq-mask-tis'"],
    f"{IS} {TYPE}=icepop": [TYPE, "needs bounds", f"{RATIO}_min=0.5 {RATIO}=5.0", "1 problem found"],
    f"{IS} {TYPE}=seq-mask-tis": [TYPE, "needs bounds", f"{RATIO}_min=0.999 {RATIO}=1.002", "1 problem found"],
    f"{TYPE}=icepop": [TYPE, "has no effect without", IS, "1 problem found"],
    f"{LEVEL}=sequence": [LEVEL, "has no effect without", IS, "1 problem found"],
    f"{IS} {RATIO}=2 {LEVEL}=turn": [LEVEL, "'token' or 'sequence'"],
    f"{IS} {TYPE}=seq-mask-tis {RATIO}=2 {LEVEL}=sequence": [LEVEL, "has one for each token", f"{LEVEL}=token"],
    f"{IS} {TYPE}=seq-mask-tis {RATIO}=2 {LOSS}.sequence_level_importance_ratios=true {LOSS}.token_level_loss=false": [
        f"{LOSS}.sequence_level_importance_ratios",
        "has one for each token",
        "1 problem found",
    ],
    f"{IS} {TYPE}=seq-mask-tis {RATIO}=2 {REJECTION}=2": [REJECTION, "the same geometric mean", f"{TYPE}=tis"],
    f"{REJECTION}=1 {REJECTION}_min=1": [f"{REJECTION}_min", "must be smaller than"],
    f"{REJECTION}=0.5": [REJECTION, "greater than or equal to 1"],
    f"{LOSS}.force_on_policy_ratio=true policy.train_global_batch_size=32": [
        f"{LOSS}.force_on_policy_ratio = True",
        "16 optimizer steps",
        f"{LOSS}.force_on_policy_ratio=null, or policy.train_global_batch_size=512",
    ],
    f"{LOSS}.token_veto_ratio=1": [f"{LOSS}.token_veto_ratio", "less than 1"],
    # One bound, or a veto, leaves the rest of what is older as it is.
    f"algorithm.rollouts.source=one_step_off generation.colocated.enabled=false {REJECTION}=2": [
        "algorithm.rollouts.source",
        "which the loss must correct",
        "1 problem found",
    ],
    f"{LOSS}.ratio_clip_c=1.1": [f"{LOSS}.ratio_clip_c", "must exceed 1 + ratio_clip_max"],
    f"{OPTIMIZER}.min_lr=1": [f"{OPTIMIZER}.min_lr", "must not exceed lr"],
    f"{OPTIMIZER}.optimizer=sgd": [f"{OPTIMIZER}.use_distributed_optimizer", "adam only"],
    f"{SCHEDULER}.lr_warmup_init=1": [f"{SCHEDULER}.lr_warmup_init", "must not exceed lr"],
    f"{SCHEDULER}.lr_decay_style=cosine {SCHEDULER}.lr_warmup_iters=1000": [
        f"{SCHEDULER}.lr_warmup_iters",
        "smaller than lr_decay_iters",
    ],
    "generation.max_new_tokens=32": ["leave room for the prompt", "policy.max_total_sequence_length=64, or generation"],
    "generation.max_new_tokens=4": ["generation.max_new_tokens", "4 digits and the end token"],
    "generation.stop_strings=['']": ["generation.stop_strings", "empty string"],
    "generation.vllm_cfg.tensor_parallel_size=2": ["generation.data_parallel_size"],
    "+generation.vllm_kwargs.dtype=half": ["generation.vllm_kwargs.dtype", "set policy.precision instead"],
    "+generation.vllm_kwargs.max_num_batched_token=512": ["EngineArgs", "did you mean max_num_batched_tokens?"],
    "generation.vllm_kwargs.disable_log_stats=true": ["generation.vllm_kwargs.disable_log_stats", "remove it"],
    "cluster.gpus_per_node=3 policy.megatron_cfg.tensor_model_parallel_size=2": ["the 3 policy ranks", "more GPUs"],
    "cluster.gpus_per_node=1 generation.colocated.enabled=false": ["resources.gpus_per_node", "colocated.enabled=true"],
    "cluster.gpus_per_node=4 generation.colocated.enabled=false generation.colocated.resources.gpus_per_node=4": [
        "generation.colocated.resources.gpus_per_node = 4",
        "one must stay",
    ],
    "cluster.gpus_per_node=8 cluster.num_nodes=2 generation.colocated.enabled=false "
    "generation.colocated.resources.num_nodes=1 generation.colocated.resources.gpus_per_node=4": ["whole nodes"],
    "cluster.gpus_per_node=4 generation.vllm_cfg.tensor_parallel_size=3": [
        "must divide the 4 GPUs",
        "one of [1, 2, 4]",
    ],
    "cluster.gpus_per_node=4 generation.data_parallel_size=3": ["generation.data_parallel_size = 3", "there are 4"],
    "cluster.gpus_per_node=2 generation=transformers generation.vllm_cfg.tensor_parallel_size=2": ["uses one GPU"],
    f"policy.model_name=MOE cluster.gpus_per_node=8 policy=megatron_gpu {TP}=2 refit.timeout_s=300": [
        "refit.timeout_s",
        "cluster.collective_timeout_s = 300",
        "refit.timeout_s=150",
    ],
    # Ranks that share each sequence.
    f"{CP}=0": [CP, "greater than 0"],
    f"cluster.cpu_ranks=2 {CP}=2": [f"{CP} = 2", "runs on GPUs", "cluster.gpus_per_node=2", "1 problem found"],
    f"cluster.gpus_per_node=2 policy=megatron_gpu {CP}=2 policy.sequence_packing.enabled=false "
    "policy.train_micro_batch_size=16": [f"{CP} = 2", "packed sequences only", "policy.sequence_packing.enabled=true"],
    f"cluster.gpus_per_node=2 policy=megatron_gpu {CP}=2 policy.dynamic_batching.enabled=true": [
        f"{CP} = 2",
        "packed sequences only",
    ],
    f"cluster.gpus_per_node=3 policy=megatron_gpu {CP}=2": [f"{CP} = 2", "context (2)", "the 3 policy ranks"],
    f"cluster.gpus_per_node=4 policy=megatron_gpu {CP}=4 {TP}=2": [f"{TP} = 2", "context (4)", "the 4 policy ranks"],
    f"cluster.gpus_per_node=2 {CP_TYPE}=ring policy=megatron_gpu {CP}=2": [CP_TYPE, "'p2p' or 'a2a'"],
    f"cluster.gpus_per_node=2 {CP_TYPE}=a2a policy=megatron_gpu": [CP_TYPE, f"or {CP}=2 or more"],
    f"policy.model_name=MOE cluster.gpus_per_node=8 policy=megatron_gpu {CP}=8 {CP_TYPE}=a2a "
    "policy.max_total_sequence_length=64 generation.max_new_tokens=16": [
        f"{CP_TYPE} = 'a2a'",
        "4 key/value heads",
        f"{CP_TYPE}=p2p",
    ],
    f"cluster.gpus_per_node=2 policy=megatron_gpu {CP}=2 policy.sequence_length_round=9000 "
    "policy.sequence_packing.train_mb_tokens=16384 policy.sequence_packing.logprob_mb_tokens=16384": [
        "policy.sequence_length_round = 9000",
        "rounds up to more than 16384 tokens",
    ],
    "policy.megatron_cfg.sequence_parallel=true": ["policy.megatron_cfg.sequence_parallel", "on a CPU"],
    "cluster.gpus_per_node=1 policy.megatron_cfg.sequence_parallel=true": ["sequence_parallel", "there is one"],
    "policy.megatron_cfg.expert_model_parallel_size=2": ["expert_model_parallel_size", "must divide the 1 ranks"],
    "cluster.gpus_per_node=4 policy.megatron_cfg.expert_model_parallel_size=3": ["must divide the 4 ranks"],
    "policy.sequence_packing.enabled=true policy.dynamic_batching.enabled=true": ["exclude each other"],
    "policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens=16": [
        "policy.sequence_packing.train_mb_tokens = 16",
        "policy.sequence_packing.train_mb_tokens=32",
        "policy.sequence_packing.logprob_mb_tokens",
    ],
    "cluster.gpus_per_node=1 policy.sequence_packing.enabled=true": ["bfloat16", "sequence_packing.enabled=false"],
    "cluster.gpus_per_node=1": ["policy.precision = 'float32'", "policy=megatron_gpu generation=vllm_gpu"],
    f"policy.model_name=MOE cluster.gpus_per_node=8 policy=megatron_gpu {TP}=2": [
        "policy.megatron_cfg.sequence_parallel=true",
    ],
    "cluster.cpu_ranks=3 policy.megatron_cfg.pipeline_model_parallel_size=3": [
        "policy.megatron_cfg.pipeline_model_parallel_size = 3",
        "must divide the model's 4 layers",
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage=2, or",
    ],
    f"cluster.cpu_ranks=3 policy.megatron_cfg.pipeline_model_parallel_size=3 {LAST_STAGE}=1": [
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage = 1",
        "leaves layers that the other pipeline stages of 3 cannot share evenly: there are 4",
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage=2",
    ],
    f"cluster.cpu_ranks=2 policy.megatron_cfg.pipeline_model_parallel_size=2 {LAST_STAGE}=1 {FIRST_STAGE}=1": [
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage = 1",
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage=3",
    ],
    f"{FIRST_STAGE}=2": [
        "policy.megatron_cfg.num_layers_in_first_pipeline_stage",
        "has no effect without policy.megatron_cfg.pipeline_model_parallel_size=2 or more",
    ],
    f"{LAST_STAGE}=0": ["policy.megatron_cfg.num_layers_in_last_pipeline_stage", "0"],
    "policy.model_name=MOE cluster.gpus_per_node=16 policy=megatron_gpu "
    "policy.megatron_cfg.expert_model_parallel_size=16": ["must divide the model's 8 experts"],
    "policy.model_name=MODEL cluster.gpus_per_node=2 policy=megatron_gpu "
    "policy.megatron_cfg.expert_model_parallel_size=2": ["the model has no experts"],
    "policy.model_name=MOE cluster.gpus_per_node=8 policy=megatron_gpu generation.vllm_cfg.tensor_parallel_size=8": [
        "must divide the model's 4 attention heads",
    ],
    "cluster.gpus_per_node=8 policy=megatron_gpu policy.train_global_batch_size=4": [
        "policy.train_global_batch_size = 4",
        "data-parallel size (8)",
    ],
    "generation.vllm_kwargs.enable_sleep_mode=true": ["set generation.colocated.enabled instead"],
    "cluster.num_nodes=2": ["cluster.cpu_ranks", "multiple of the 2 nodes", "cluster.cpu_ranks=2"],
    "policy.max_total_sequence_length=4096": ["policy.max_total_sequence_length", "128 positions"],
    "policy.model_name=MODEL": ["policy.model_name", "head_dim >= 32"],
    "algorithm=dpo algorithm.val_metric=accuracy": ["algorithm.higher_is_better=true", "1 problem found"],
    "algorithm.higher_is_better=true algorithm=sft": ["the worst val_loss", "1 problem found"],
    "data.prompt_template='{x} y'": ["data.prompt_template", "does not read this", "data=file", "1 problem found"],
    "data=reasoning_gym data.task=chain_sum data.train_path=x.jsonl": ["data.train_path=null", "1 problem found"],
    "logger.wandb_enabled=true": ["logger.wandb.mode", "wandb login", "offline"],
    # What replicas exchange while they compute.
    f"cluster.cpu_ranks=2 {DDP}.overlap_param_gather=true": [
        f"{DDP}.overlap_param_gather = True",
        f"{DDP}.overlap_grad_reduce=true",
        "1 problem found",
    ],
    f"cluster.cpu_ranks=2 {DDP}.overlap_param_gather=true {DDP}.overlap_grad_reduce=true "
    f"{OPTIMIZER}.use_distributed_optimizer=false": [
        f"{DDP}.overlap_param_gather = True",
        f"{OPTIMIZER}.use_distributed_optimizer=true",
        "1 problem found",
    ],
    f"{DDP}.overlap_grad_reduce=true": [f"{DDP}.overlap_grad_reduce", "several data-parallel replicas"],
    f"cluster.cpu_ranks=2 {DDP}.bucket_size=1000000": [f"{DDP}.bucket_size", "overlap_grad_reduce=true"],
    f"{DDP}.bucket_size=0": [f"{DDP}.bucket_size", "greater than 0"],
    # What leaves the GPU. GPU stands for a run on one, MOE for a model with experts.
    "offload=cpu_optimizer": [
        f"{OPTIMIZER}.optimizer_cpu_offload = True",
        "in host memory already",
        "1 problem found",
    ],
    f"{OPTIMIZER}.optimizer_offload_fraction=1.5": [
        f"{OPTIMIZER}.optimizer_offload_fraction",
        "less than or equal to 1",
    ],
    f"{GPU} offload=cpu_optimizer {OPTIMIZER}.optimizer_offload_fraction=0.0": [
        f"{OPTIMIZER}.optimizer_offload_fraction = 0.0",
        "greater than 0",
        "1 problem found",
    ],
    f"{GPU} offload=cpu_optimizer {OPTIMIZER}.use_distributed_optimizer=false": [
        f"{OPTIMIZER}.use_distributed_optimizer = False",
        "sharded states",
        "1 problem found",
    ],
    f"{GPU} offload=cpu_optimizer {OPTIMIZER}.optimizer=sgd {OPTIMIZER}.use_distributed_optimizer=false": [
        f"{OPTIMIZER}.optimizer = 'sgd'",
        f"{OPTIMIZER}.optimizer=adam",
        "1 problem found",
    ],
    f"{GPU} {OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true": [
        f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d = True",
        "which is off",
        "1 problem found",
    ],
    f"{GPU} offload=cpu_optimizer policy.offload_optimizer_states_for_logprob=true": [
        "policy.offload_optimizer_states_for_logprob = True",
        "no phase moves optimizer states",
        "1 problem found",
    ],
    f"{GPU} offload=cpu_optimizer {OPTIMIZER}.optimizer_offload_fraction=0.5 "
    "policy.offload_for_generation=[gradients,optimizer_states]": [
        "policy.offload_for_generation = ['gradients', 'optimizer_states']",
        "policy.offload_for_generation=[gradients]",
        "1 problem found",
    ],
    "offload=activations": [f"{ACTIVATIONS} = True", "in host memory already", "1 problem found"],
    f"{GPU} {ACTIVATIONS}=true": [f"{MODULES} = 'null'", f"{MODULES}=[core_attn]", "1 problem found"],
    f"{GPU} {ACTIVATIONS}=true {MODULES}=[]": [f"{MODULES} = []", "must name modules", "1 problem found"],
    f"{MODULES}=[attention]": [f"{MODULES}.0", "'core_attn'"],
    f"{GPU} {ACTIVATIONS}=true {MODULES}=[core_attn,qkv_linear,core_attn]": [
        "names a module twice",
        f"{MODULES}=[core_attn,qkv_linear]",
        "1 problem found",
    ],
    f"{GPU} {ACTIVATIONS}=true {MODULES}=[attn_proj]": [
        "attn_proj needs core_attn",
        f"{MODULES}=[core_attn,attn_proj]",
        "1 problem found",
    ],
    f"{GPU} {ACTIVATIONS}=true {MODULES}=[core_attn,moe_act,expert_fc1]": [
        "has no moe_act and no expert_fc1",
        f"{MODULES}=[core_attn]",
        "1 problem found",
    ],
    f"{GPU} policy.model_name=MOE {ACTIVATIONS}=true {MODULES}=[mlp]": [
        "has only layers with experts, so it has no mlp",
        f"{MODULES}=[core_attn]",
        "1 problem found",
    ],
    f"{SHARE}=0.0": [SHARE, "greater than 0"],
    f"{GPU} {ACTIVATIONS}=true {MODULES}=[attn_norm,mlp_norm]": ["nothing to offload", "attn_norm and mlp_norm"],
    f"{GPU} policy.model_name=MOE {ACTIVATIONS}=true {MODULES}=[attn_norm]": ["nothing to offload", "1 problem found"],
    f"{GPU} policy.model_name=MOE cluster.gpus_per_node=3 {PP}=3 policy.train_global_batch_size=96 "
    f"{ACTIVATIONS}=true {MODULES}=[core_attn,qkv_linear]": ["more than one layer", f"{MODULES}=[core_attn]"],
    f"{GPU} offload=activations policy.megatron_cfg.activation_checkpointing=true": [
        "policy.megatron_cfg.activation_checkpointing = True",
        "nothing to offload",
        "1 problem found",
    ],
    # What CUDA graphs of training do not hold.
    f"{GRAPHS}=local": [GRAPHS, "full_iteration"],
    f"{GPU} cluster.gpus_per_node=2 {GRAPHS}=full_iteration {TP}=2": [
        f"{TP} = 2",
        "CUDA graphs do not hold a pass that exchanges tensors with ranks",
        f"{TP}=1, or {GRAPHS}=none",
        "1 problem found",
    ],
    f"{GPU} {GRAPHS}=full_iteration policy.megatron_cfg.activation_checkpointing=true {PEFT}.enabled=true": [
        "policy.megatron_cfg.activation_checkpointing = True",
        f"{PEFT}.enabled = True",
        "2 problems found",
    ],
    f"{GPU} {GRAPHS}=full_iteration {ACTIVATIONS}=true {MODULES}=[core_attn]": [
        f"{ACTIVATIONS} = True",
        "CUDA graphs do not hold copies to host memory",
        "1 problem found",
    ],
    f"{GPU} cluster.gpus_per_node=2 {GRAPHS}=full_iteration {DDP}.overlap_grad_reduce=true": [
        f"{DDP}.overlap_grad_reduce = True",
        "reduced during the backward pass",
        "1 problem found",
    ],
    f"{GPU} cluster.gpus_per_node=2 {GRAPHS}=full_iteration {CP}=2": [f"{CP} = 2", f"{CP}=1, or {GRAPHS}=none"],
    f"{GPU} {GRAPHS}=full_iteration policy.sequence_packing.enabled=false": [
        f"{GRAPHS} = 'full_iteration'",
        "batches are fixed",
        "policy.sequence_packing.enabled=true",
        "1 problem found",
    ],
    f"{ON_A_GPU} {GRAPHS}=full_iteration policy.offload_for_generation=[gradients,optimizer_states] "
    "generation.colocated.sleep=true": [
        "policy.offload_for_generation = ['gradients', 'optimizer_states']",
        "gradients come back to other ones",
        "'policy.offload_for_generation=[optimizer_states]'",
        "1 problem found",
    ],
    f"{GPU} {GRAPHS}=full_iteration policy.model_name=MOE": [
        f"{GRAPHS} = 'full_iteration'",
        "counts the tokens of each expert",
        "1 problem found",
    ],
    f"{ON_A_GPU} {GRAPHS}=full_iteration policy.model_name=someone/unknown-experts policy.router_replay.enabled=true": [
        "policy.router_replay.enabled = True",
        "CUDA graphs do not hold the experts that the engines chose",
        f"policy.router_replay.enabled=false, or {GRAPHS}=none",
        "1 problem found",
    ],
    # Kernels of experts.
    f"{GPU} policy.model_name=QWEN_MOE {ROUTER_FUSION}=true": [
        f"{ROUTER_FUSION} = True",
        "compute in float32",
        "policy.megatron_cfg.moe_router_dtype=fp32",
        "1 problem found",
    ],
    f"{ON_A_GPU} policy.model_name=QWEN_MOE {ROUTER_FUSION}=true policy.megatron_cfg.moe_router_dtype=fp32 "
    "policy.router_replay.enabled=true": [f"{ROUTER_FUSION} = True", "router replay gives them", "1 problem found"],
    f"{GPU} policy.megatron_cfg.moe_permute_fusion=false": ["moe_permute_fusion = False", "no experts"],
    # Models, data and rewards that are not there or not usable.
    "policy.model_name=./no/such/model": ["policy.model_name", "no such folder"],
    "policy.model_name=models/mine": [
        "policy.model_name = 'models/mine'",
        "no such folder",
        "a Hugging Face model folder",
    ],
    "recipes=grpo-smollm2-135m-1n1g": ["policy.model_name", "no such folder", "python scripts/get_smollm2.py"],
    "--dry-run recipes=grpo-smollm2-135m-1n1g": ["policy.model_name", "no such folder", "1 problem found"],
    "policy.model_name=~nobody-here/x": [
        "is not an override",
        "quote a value",
        "\"policy.model_name='~nobody-here/x'\"",
    ],
    "data.system_prompt=\\boxed{}.": ["is not an override", "\"data.system_prompt='\\boxed{}.'\""],
    "data.system_prompt={a$b": ["is not an override", "'data.system_prompt='\"'\"'{a$b"],
    "policy.model_name='~nobody-here/x'": ["policy.model_name", "home directory"],
    "policy.model_name='a b/c'": ["policy.model_name", "no such folder"],
    "policy.model_name=PICKLED": ["policy.model_name", "no *.safetensors"],
    "policy.model_name=EMPTY": ["policy.model_name", "no config.json"],
    "policy.model_name=embedded:chess": ["policy.model_name", "embedded:reverse-digits"],
    "data=file data.validation_path=DATA": ["data.train_path", "is null"],
    "data=file data.train_path=no.jsonl": ["data.train_path", "no such file"],
    "data=file data.train_path=DATA data.validation_path=DATA data.answer_column=solution": [
        "data.train_path",
        "row 1",
        "no column 'solution' (columns: prompt, answer)",
        "or data.answer_column=NAME",
    ],
    "algorithm=sft data=file data.train_path=DATA data.validation_path=DATA data.answer_column=solution": [
        "no column 'solution' (columns: prompt, answer)",
        "or data.response_column=NAME",
    ],
    "data=file data.train_path=BROKEN data.validation_path=DATA": ["data.train_path", "row 2", "not JSON"],
    "data=file data.train_path=BLANK data.validation_path=DATA": ["data.train_path", "no rows"],
    "data=file data.train_path=NULL data.validation_path=DATA": ["row 1", "column 'answer' is null"],
    "data=file data.train_path=LATIN data.validation_path=DATA": ["data.train_path", "cannot be read"],
    "data=file data.train_path=NESTED data.validation_path=DATA": ["row 1", "not a structure"],
    "data=file data.train_path='~nobody-here/x.jsonl' data.validation_path=DATA": ["data.train_path", "cannot be read"],
    "policy.tokenizer.chat_template=none.jinja": ["policy.tokenizer.chat_template", "cannot be read: No such file"],
    "policy.tokenizer.chat_template='~nobody-here/x.jinja'": ["policy.tokenizer.chat_template", "cannot be read"],
    "policy.tokenizer.chat_template=UNENDED": ["policy.tokenizer.chat_template", "the template is broken: line 1"],
    "data=file data.train_path=DATA": ["data.validation_path", "validation is on"],
    "data.name=squad": ["data.name", "file, hub, reverse_digits, reasoning_gym"],
    "data=file data.train_path=DATA data.validation_path=DATA data.validation_fraction=0.1": [
        "data.validation_fraction",
        "names the validation problems already",
    ],
    "data=file data.train_path=MODEL": ["data.train_path", "must end in .parquet, or in .jsonl or .json"],
    "data=file data.train_path=TORN data.validation_path=DATA": ["data.train_path", "TORN.parquet: cannot be read"],
    "data=file data.train_path=DATA data.validation_path=DATA data.task_kwargs.n=1": ["rows take no arguments"],
    "data=file data.train_path=DATA data.validation_path=DATA data.prompt_template='{prompt} {hint}'": [
        "data.train_path",
        "row 1: no column 'hint' (columns: prompt, answer)",
    ],
    "data.prompt_template='{prompt.__class__}'": ["data.prompt_template", "than a column's name"],
    "data.prompt_template='{prompt'": ["data.prompt_template", "is no template"],
    "data.prompt_template='hello'": ["data.prompt_template", "names no column"],
    "data.answer_pattern='(a'": ["data.answer_pattern", "no regular expression"],
    "data.answer_pattern='a'": ["data.answer_pattern", "has no group"],
    "data=file data.train_path=DATA data.validation_path=DATA data.answer_pattern='## (.+)'": [
        "data.train_path",
        "row 1: data.answer_pattern is not in column 'answer', which ends '4'",
    ],
    "data.too_long=cut": ["data.too_long", "'error', 'drop' or 'truncate'"],
    "data.too_long=truncate": ["data.too_long", "would cut off a prompt's end", "data.too_long=drop"],
    "data.validation_fraction=1": ["data.validation_fraction", "less than 1"],
    "data=gsm8k": [
        "data.train_path",
        "is null",
        "fix: data.train_path=FILE, or data.name=hub, which fetches openai/gsm8k",
        "data.validation_path",
    ],
    "data=hub": ["data.path", "organisation/name"],
    "data=hub data.path=''": ["data.path", "organisation/name"],
    "data=hub data.path=a/b": ["data.validation_split", "validation is on", "data.validation_fraction=0.05"],
    "data=reasoning_gym": ["data.task", "names no task"],
    "data=reasoning_gym data.task=chain_sums": ["data.task", "no such task", "did you mean chain_sum"],
    "data=reasoning_gym data.task=chain_sum data.task_kwargs.min_term=2": [
        "data.task_kwargs.min_term",
        "did you mean min_terms",
    ],
    "data=reasoning_gym data.task=chain_sum data.task_kwargs.min_terms=0": [
        "data.task_kwargs",
        "min_terms must be positive",
    ],
    "data=reasoning_gym data.task=chain_sum data.validation_fraction=0": [
        "data.validation_fraction",
        "holds nothing out",
    ],
    "data=reasoning_gym data.task=chain_sum data.prompt_template='{riddle}'": ["no column 'riddle'"],
    "data.task_kwargs.num_digits=1": ["data.task_kwargs.num_digits", "integer between 2 and 20"],
    "+data.task_kwargs.digits=5": ["data.task_kwargs.digits", "no such argument"],
    "data.task_kwargs.num_digits=two": ["data.task_kwargs.num_digits", "integer between 2 and 20"],
    "data=file data.train_path=rows.csv data.validation_path=DATA": ["data.train_path", "pandas.read_csv('rows.csv')"],
    "data=file data.train_path=rows.jsonl.gz data.validation_path=DATA": ["data.train_path", "gunzip"],
    "data=file data.train_path=ZIPPED data.validation_path=DATA": ["is compressed by gzip", "fix: unpack it"],
    "data=file data.train_path=https://x.org/a.jsonl data.validation_path=DATA": ["is an address", "fix: download"],
    "data=file data.train_path=openai/gsm8k data.validation_path=DATA": ["data=hub data.path=openai/gsm8k"],
    "data=file data.train_path=WHOLE data.validation_path=DATA": [
        "no column 'prompt', but 'messages'",
        "algorithm=sft",
    ],
    "data=file data.train_path=TRUE data.validation_path=DATA": ["TRUE.jsonl, row 1", "found True"],
    "data=file data.train_path=TWICE data.validation_path=DATA": ["TWICE.jsonl, row 1", "the key 'answer'"],
    "reward.name=vibes": ["reward.name", "exact_match, last_number, format, math, reasoning_gym"],
    "reward=reasoning_gym": ["reward.name", "problems of data=reasoning_gym alone"],
    "reward=format": ["reward.kwargs.pattern", "has no value"],
    "reward=format reward.kwargs.pattern='('": ["reward.kwargs.pattern", "no regular expression"],
    "reward=format reward.kwargs.pattern=7": ["reward.kwargs.pattern", "must be a regular expression"],
    "reward=math reward.timeout_s=0": ["reward.timeout_s", "greater than 0"],
    "reward=math reward.processes=0": ["reward.processes", "greater than 0"],
    "environment=chess": ["environment", "calculator, nemo_gym, none"],
    "environment.name=chess": ["environment.name", "choose one of calculator"],
    "environment.name=no_such_package.Game": ["environment.name", "there is no module no_such_package"],
    "environment.max_turns=3": ["environment.max_turns", "without an environment", "environment=calculator"],
    "environment=calculator environment.max_turns=0": ["environment.max_turns", "greater than 0"],
    # Algorithms: each has its own keys and rules, and only those of the chosen one are checked.
    "algorithm=sftt": ["algorithm", "did you mean algorithm=sft", "cispo, dapo, distillation, dpo"],
    "algorithm.name=sft": ["algorithm.name", "is set by the algorithm's file", "algorithm=sft"],
    "algorithm.max_num_epochs=2": [
        "algorithm.max_num_epochs",
        "is a key of algorithm=dpo and algorithm=kto and algorithm=orpo and algorithm=sft only",
    ],
    "algorithm=sft algorithm.num_prompts_per_step=4": [
        "algorithm.num_prompts_per_step",
        "is a key of algorithm=grpo and algorithm=distillation only",
    ],
    f"algorithm=sft {LOSS}.ratio_clip_min=0.1": [
        f"{LOSS}.ratio_clip_min",
        "is a key of algorithm=grpo and algorithm=distillation only",
    ],
    "algorithm=sft algorithm.max_num_epoch=2": ["algorithm.max_num_epoch", "did you mean algorithm.max_num_epochs"],
    "algorithm=sft algorithm.max_num_epochs=0": ["algorithm.max_num_epochs", "greater than 0", "1 problem found"],
    "algorithm=sft algorithm.seed=abc": ["algorithm.seed", "must be an integer", "1 problem found"],
    "algorithm=sft algorithm.val_period='???'": ["algorithm.val_period", "has no value", "1 problem found"],
    "algorithm=sft algorithm.max_num_steps=null": ["algorithm.max_num_steps", "never ends", "=100"],
    "algorithm=sft algorithm.max_num_steps=null algorithm.max_num_epochs=null data=file data.train_path=DATA "
    "data.validation_path=DATA": ["algorithm.max_num_steps", "so is algorithm.max_num_epochs"],
    "algorithm=sft data.response_column=worked": ["data.response_column", "has no such columns", "=null"],
    "algorithm=sft data=file data.train_path=DATA data.validation_path=DATA data.response_column=worked": [
        "data.train_path",
        "row 1",
        "no column 'worked' (columns: prompt, answer)",
        "or data.response_column=NAME",
    ],
    # Losses by dotted path.
    "algorithm.loss=MyLoss": ["algorithm.loss", "must be a dotted path"],
    "algorithm.loss=no_such_package.Loss": ["algorithm.loss", "cannot be imported", "package.module.Class"],
    "algorithm=sft algorithm.loss=math.nothing": ["algorithm.loss", "cannot be imported", "algorithm.loss=null"],
    "algorithm=dpo algorithm.loss=math.pi": ["algorithm.loss", "cannot be called", "name a class"],
    "algorithm.loss=nemo_rl_lite.losses.preference.DPOLoss +algorithm.loss_kwargs.limit=5": [
        "algorithm.loss_kwargs",
        "do not fit nemo_rl_lite.losses.preference.DPOLoss",
        "limit",
        "DPOLoss(options, **algorithm.loss_kwargs)",
    ],
    "algorithm.loss=builtins.repr": ["algorithm.loss", "makes a str without __call__ and counts", "protocol Loss"],
    "+algorithm.loss_kwargs.limit=5": ["algorithm.loss_kwargs", "algorithm.loss, which is null"],
    "algorithm.loss=nemo_rl_lite.losses.sft.sft_loss": ["is made from SFTConfig", "algorithm.loss=null"],
    "algorithm.loss=nemo_rl_lite.losses.preference.DPOLoss": [
        "is made from DPOConfig",
        "this run is algorithm=grpo",
    ],
    "algorithm.loss=tests.unit.rules.losses.Unheard": ["algorithm.loss", "needs attention", "entropy and topk_logits"],
    "algorithm.loss=tests.unit.rules.losses.Topk": ["algorithm.loss", "needs topk_logits and has no int `topk`"],
    "algorithm.loss=tests.unit.rules.losses.OfTeacher": [
        "algorithm.loss",
        "the tokens that a teacher names",
        "algorithm=distillation algorithm.topk_logits_k=64",
    ],
    # Sweeps: every job is checked before the first one starts.
    "-m algorithm.seed=1,abc": ["algorithm.seed", "must be an integer"],
    "-m generation.temperature=0,1 algorithm.seed=1,2": ["generation.temperature", "greater than 0"],
    "-m --cfg job": ["-m --cfg job", "drop one"],
    "-m algorithm.seed=interval(1,5)": ["algorithm.seed = 'interval(1,5)'", "no list of values", "range(1,4)"],
    "-m algorithm.seed=1,2 hydra.sweep.dir=DATA": ["hydra.sweep.dir", "DATA.jsonl"],
    "--dry-run=true": ["--dry-run=true", "takes no value", "write --dry-run"],
    "--multirun=true algorithm.seed=1": ["--multirun=true", "write --multirun"],
    "-m algorithm.seed=3": ["-m", "no key has several values", "algorithm.seed=1,2,3"],
    "--dryrun --dry-run": ["--dryrun", "did you mean --dry-run?", "1 problem found"],
    "--dry-run --help": ["--dry-run --help", "drop one"],
    "--learning-rate 1e-5": ["--learning-rate", "policy.megatron_cfg.optimizer.lr=...", "1 problem found"],
    "--max_steps=5 algorithm.seed=x": ["--max_steps=5", "algorithm.max_num_steps=...", "2 problems found"],
    "--resolve": ["--resolve", "--cfg job --resolve"],
    "--package policy": ["--package", "--cfg job"],
    "--shell-completion": ["--shell-completion", "is no flag"],
    "--config-name other": ["--config-name", "is no flag", "1 problem found"],
    "data=file data.train_path=[a.jsonl,b.jsonl] data.validation_path=DATA": ["name of a file", "'data/*.jsonl'"],
    "-m algorithm.seed=1,1": ["-m", "algorithm.seed=1 is one job twice"],
    "-m algorithm.seed=1,2 hydra.run.dir=x": ["hydra.run.dir", "hydra.sweep.dir=x"],
    "hydra.sweep.dir=x": ["hydra.sweep.dir", "is for sweeps (-m)", "hydra.run.dir=x"],
    "+hydra.run.dirr=x": ["hydra.run.dirr", "is no setting of this launcher"],
    "algorithm.seed=1,2": ["algorithm.seed = '1,2'", "gives several values", "nrl-lite train -m"],
    "run_name=" + 300 * "x": ["run_name", "at most 200 letters"],
    "hydra.run.dir=outputs/" + 300 * "x": ["hydra.run.dir", "more than 255 bytes"],
    "cluster.cpu_ranks=1000": ["cluster.cpu_ranks", "gives the run"],
    "reward=math reward.processes=4096": ["reward.processes", "gives the run"],
    "policy.sequence_packing.enabled=true policy.sequence_length_round=10000": ["policy.sequence_length_round=64"],
    "checkpoint.must_save_by=0:00": ["checkpoint.must_save_by", "leaves no time"],
    "cluster.start_timeout_s=0.01": ["cluster.start_timeout_s", "greater than or equal to 1"],
    "-m algorithm.seed=range(5,1)": ["-m", "no key has several values"],
    "refit.timeout_s=0.001": ["refit.timeout_s", "greater than or equal to 1"],
    "logger.mismatch_warning=0.5": ["logger.mismatch_warning", "greater than or equal to 1"],
    "generation.top_k=1": ["generation.top_k", "no advantage is left"],
    "logger.wandb_enabled=true logger.wandb.mode=offline logger.wandb.project=team/proj": ["logger.wandb.entity"],
    "logger.mlflow_enabled=true logger.mlflow.tracking_uri=ftp://x": ["no store of this kind", "./mlruns"],
    "algorithm=sft algorithm.early_stop_patience=9 algorithm.max_num_steps=20 algorithm.val_period=10": [
        "algorithm.early_stop_patience",
        "20 steps have 4",
    ],
    # Keys that another key switches off.
    "algorithm.val_period=3 algorithm.val_at_end=false checkpoint.save_period=2 algorithm.max_num_steps=4 "
    "checkpoint.keep_best=2": ["checkpoint.keep_best", "a validation of a step that is saved", "1 problem found"],
    f"{FILES} {OFF}": ["data.validation_path", "without a validation", "1 problem found"],
    f"data=file data.train_path=DATA data.validation_fraction=0.5 {OFF}": [
        "data.validation_fraction",
        "takes rows from the training that nothing reads without a validation",
    ],
    "reward=math reward.timeout_s=null reward.processes=8": ["reward.processes", "reward.timeout_s=60"],
    "cluster.gpus_per_node=8 policy=megatron_gpu generation=vllm_gpu policy.max_total_sequence_length=64 "
    "generation.max_new_tokens=16 generation.colocated.enabled=false generation.colocated.resources.gpus_per_node=4 "
    "refit.direct=false": ["refit.direct", "generation.colocated.enabled=true", "1 problem found"],
    f"algorithm=sft {FILES} data.response_column=answer data.answer_column=other policy.train_global_batch_size=1": [
        "data.answer_column",
        "data.response_column=null",
        "1 problem found",
    ],
    "algorithm=sft data=hub data.path=a/b data.validation_fraction=0.1 data.messages_column=m data.prompt_column=x": [
        "data.prompt_column",
        "data.messages_column=null",
        "1 problem found",
    ],
    f"algorithm=sft {FILES} data.response_column=answer data.train_on=last": ["data.train_on", "whole chats"],
    # One column that is read as two, or that shows the answer.
    f"{FILES} data.prompt_column=answer": ["data.answer_column", "is data.prompt_column too", "1 problem found"],
    f"algorithm=sft {FILES} data.response_column=prompt": ["data.response_column", "is data.prompt_column too"],
    f"algorithm=dpo {FILES} data.prompt_column=chosen": ["data.chosen_column", "is data.prompt_column too"],
    f"algorithm=dpo {FILES} data.rejected_column=chosen": ["data.rejected_column", "is data.chosen_column too"],
    f"{FILES} data.prompt_template='{{prompt}} {{answer}}'": ["data.prompt_template", "shows the model", "'answer'"],
    f"algorithm=dpo data=file data.train_path=EQUAL {OFF}": ["data.train_path", "prefer neither response"],
    f"algorithm=sft {FILES}": ["policy.train_global_batch_size", "is more than the 1 row(s) of", "size=1", "1 problem"],
    "algorithm=sft data=file data.train_path=DATA policy.train_global_batch_size=3": [
        "policy.train_global_batch_size=1",
        "data.validation_path",
        "2 problems",
    ],
    "algorithm=sft logger.log_samples=10": ["logger.log_samples", "algorithm=grpo"],
    "refit.bucket_bytes=1000000 refit.buffer_memory_ratio=0.1": ["refit.buffer_memory_ratio", "bucket_bytes=null"],
    "refit.num_buffers=4": ["refit.num_buffers", "generation.colocated.enabled=false"],
    "policy.overlap_offload=true": ["policy.overlap_offload", "something to move"],
    "reward.processes=2": ["reward.processes", "exact_match and last_number"],
    f"{OFF} algorithm.val_samples_per_problem=2": ["algorithm.val_samples_per_problem", "algorithm.val_at_end=true"],
    "algorithm.val_at_start=false algorithm.val_at_end=false algorithm.val_period=50 algorithm.val_temperature=0.5": [
        "1. algorithm.val_period",
        "2. algorithm.val_temperature",
        "algorithm.val_at_end=true",
        "2 problems found",
    ],
    "algorithm=sft algorithm.max_num_epochs=5": [
        "leave algorithm.max_num_epochs out, or data=file or data=hub (generated data never ends)"
    ],
    "algorithm=dpo algorithm.sft_average_log_probs=true": ["algorithm.sft_loss_weight=1"],
    "data.prompt_column=question": ["data.prompt_column", "has no effect without"],
    "data.task=chain_sum": ["data.task", "data=reasoning_gym"],
    "data.subset=main": ["data.subset", "data.name=hub"],
    "policy.sequence_length_round=7": ["policy.sequence_length_round", "sequence_packing.enabled=true"],
    "algorithm=dpo environment=calculator": ["environment", "has no effect without algorithm=grpo"],
    f"{PEFT}.dim=8": [f"{PEFT}.dim", f"{PEFT}.enabled=true"],
    "cluster.gpus_per_node=1 policy=megatron_gpu policy.train_micro_batch_size=4": ["policy.sequence_packing"],
    "logger.wandb.project=x": ["logger.wandb.project", "logger.wandb_enabled=true"],
    "generation=transformers generation.vllm_kwargs.block_size=16": ["generation=vllm", "1 problem found"],
    "-m policy.precision=[": ["is not an override"],
    "-m just-a-word algorithm.seed=1,2": ["just-a-word", "is not an override"],
    "-m algorithm.seed=range(1,4) policy.logprob_batch_size=48": ["policy.logprob_batch_size", "512 samples"],
    "-m algorithm=grpo,sft algorithm.max_num_epochs=2": [
        "algorithm.max_num_epochs",
        "is a key of algorithm=dpo and algorithm=kto and algorithm=orpo and algorithm=sft only",
    ],
    "--dry-run -m algorithm.seed=1,2 hydra.sweep.dir=a,b": ["hydra.sweep.dir", "several folders", "hydra.sweep.dir=a"],
    f"{SCHEDULER}.lr_decay_iters=120": [f"{SCHEDULER}.lr_decay_iters", "has no effect", "lr_decay_style=cosine"],
    f"{SCHEDULER}.lr_decay_style=cosine {OPTIMIZER}.lr=1e-5 {OPTIMIZER}.min_lr=1e-5": [
        f"{OPTIMIZER}.min_lr",
        "lr_decay_style=cosine would change nothing",
    ],
    "algorithm.max_num_steps=10 algorithm.val_period=100 algorithm.val_at_end=false": [
        "algorithm.val_period",
        "has no effect",
        "up to algorithm.max_num_steps",
    ],
    "logger.wandb_enabled=true logger.wandb.mode=offline logger.wandb.entity='my team/alice'": [
        "logger.wandb.entity",
        "no user or team",
    ],
    "data=hub data.path=here data.validation_split=train": ["data.validation_split", "is data.train_split too"],
    "-m algorithm=grpo,ppo": ["algorithm", "no such file"],
    f"cluster.cpu_ranks=2 {TP}=2 {PEFT}.enabled=true {PEFT}.dim=3": [
        f"{PEFT}.dim",
        "split over tensor-parallel ranks (2)",
        f"{PEFT}.dim=4",
    ],
    "generation.vllm_cfg.lora=adapters": ["generation.vllm_cfg.lora", f"{PEFT}.enabled=true"],
    f"{PEFT}.enabled=true generation=transformers generation.vllm_cfg.lora=adapters": [
        "generation.vllm_cfg.lora",
        "has no effect without generation=vllm",
    ],
    f"{SERVED} {PEFT}.dim=513": [f"{PEFT}.dim", "at most 512", f"{PEFT}.dim=512"],
    f"{SERVED} policy.precision=float32 policy.sequence_packing.enabled=false": ["policy.precision", "in bfloat16"],
    f"{SERVED} policy.model_name=QWEN_MOE": ["generation.vllm_cfg.lora", "experts", "generation.vllm_cfg.lora=merged"],
    f"{SERVED} +generation.vllm_kwargs.quantization=fp8_per_block": [
        "generation.vllm_kwargs.quantization",
        "next to quantised weights",
    ],
    f"{SERVED} +generation.vllm_kwargs.load_format=dummy": ["generation.vllm_kwargs.load_format", "adapters alone"],
    f"{PEFT}.target_modules=[q_proj]": [f"{PEFT}.target_modules", "'linear_qkv'"],
    f"{PEFT}.enabled=true {EXPERTS}=2 cluster.cpu_ranks=2": [f"{PEFT}.enabled", "would be exported wrongly"],
    f"{GPU} {PEFT}.enabled=true {ACTIVATIONS}=true {MODULES}=[core_attn]": [ACTIVATIONS, "weights that are frozen"],
    "data.messages_column=chat": ["data.messages_column", "is not read with algorithm=grpo", "algorithm=sft"],
    "algorithm=dpo data.response_column=x": ["data.response_column", "is not read with algorithm=dpo"],
    "algorithm=sft data.tools_column=x": ["data.tools_column", "data.messages_column is null"],
    "algorithm=sft algorithm.early_stop_patience=2 algorithm.val_period=0": [
        "algorithm.early_stop_patience",
        "counts validations",
    ],
    "algorithm=dpo algorithm.preference_loss=ipo algorithm.label_smoothing=0.1": [
        "algorithm.label_smoothing",
        "preference_loss=ipo has no such term",
    ],
    "algorithm=distillation": ["teacher.model_name", "is null", "teacher.model_name=FOLDER"],
    "teacher.model_name=MODEL": ["teacher.model_name", "has no effect", "algorithm=distillation"],
    "algorithm=distillation teacher.model_name=./nowhere": ["teacher.model_name", "no such folder"],
    f"{TAUGHT} cluster.cpu_ranks=2 teacher.megatron_cfg.tensor_model_parallel_size=4": [
        "teacher.megatron_cfg.tensor_model_parallel_size",
        "must divide the 2 policy ranks",
    ],
    f"{TAUGHT} cluster.cpu_ranks=3 teacher.megatron_cfg.pipeline_model_parallel_size=3": [
        "teacher.megatron_cfg.pipeline_model_parallel_size",
        "must divide the model's 4 layers",
        "teacher.megatron_cfg.num_layers_in_last_pipeline_stage=2",
    ],
    f"{TAUGHT} teacher.megatron_cfg.num_layers_in_first_pipeline_stage=1": [
        "teacher.megatron_cfg.num_layers_in_first_pipeline_stage",
        "has no effect",
        "teacher.megatron_cfg.pipeline_model_parallel_size=2 or more",
    ],
    f"{TAUGHT} teacher.megatron_cfg.sequence_parallel=true": ["teacher.megatron_cfg.sequence_parallel", "on a CPU"],
    f"{TAUGHT} policy.sequence_packing.enabled=true teacher.logprob_mb_tokens=16": [
        "teacher.logprob_mb_tokens = 16",
        "must hold one sequence",
        "teacher.logprob_mb_tokens=32",
    ],
    f"{TAUGHT} teacher.logprob_mb_tokens=64": ["teacher.logprob_mb_tokens", "policy.sequence_packing.enabled=true"],
    f"{TAUGHT} algorithm.topk_logits_k=0": ["algorithm.topk_logits_k", "greater than 0"],
    f"{TAUGHT} algorithm.topk_logits_k=1000": ["algorithm.topk_logits_k", "exceeds the teacher's"],
    "algorithm=distillation teacher.model_name=MODEL algorithm.topk_logits_k=8": [
        "teacher.model_name",
        "the policy does not have",
        "algorithm.topk_logits_k=null",
    ],
    f"{TAUGHT} {LOSS}.kl_type=reverse": [f"{LOSS}.kl_type", "algorithm.topk_logits_k=64"],
    f"{TAUGHT} algorithm.topk_logits_k=8 {LOSS}.kl_type=forward {LOSS}.mixed_kl_weight=0.2": [
        f"{LOSS}.mixed_kl_weight",
        f"{LOSS}.kl_type=mixed",
    ],
    f"{TAUGHT} algorithm.topk_logits_k=8 {LOSS}.ratio_clip_min=0.1": [
        f"{LOSS}.ratio_clip_min",
        "algorithm.topk_logits_k=null",
    ],
    f"{TAUGHT} algorithm.topk_logits_k=8 {LOSS}.reward_coef=0.5": [f"{LOSS}.reward_coef", "on sampled tokens"],
    f"{TAUGHT} algorithm.num_generations_per_prompt=1 {LOSS}.reward_coef=0.5 policy.train_global_batch_size=64": [
        "algorithm.num_generations_per_prompt",
        "the reward compares samples",
    ],
    f"{TAUGHT} {LOSS}.policy_loss=clip_cov": [
        f"{LOSS}.policy_loss",
        "before a policy is asked",
        f"{LOSS}.policy_loss=clip",
    ],
    f"{TAUGHT} {LOSS}.policy_loss=kl_cov": [
        f"{LOSS}.policy_loss",
        "before a policy is asked",
        f"{LOSS}.policy_loss=clip",
    ],
    f"{TAUGHT} algorithm.use_dynamic_sampling=true": [
        "algorithm.use_dynamic_sampling",
        "which the teacher teaches as well",
    ],
    f"{TAUGHT} algorithm.normalize_rewards=false": ["algorithm.normalize_rewards", f"{LOSS}.reward_coef=1.0"],
    "reward=none": ["algorithm.name", "reward=none is 0 for every response", "algorithm=distillation"],
    "data.min_reward=1.0": ["data.min_reward", "is not read with algorithm=grpo", "algorithm=sft"],
    "algorithm=sft data.min_reward=1.0": ["data.min_reward", "has no effect", "data=samples"],
    "algorithm=dpo algorithm.label_smoothing=0.5": ["algorithm.label_smoothing", "less than 0.5"],
    "algorithm=dpo algorithm.preference_loss=kto": ["algorithm.preference_loss", "'dpo', 'ipo'"],
    "algorithm=dpo data=reasoning_gym data.task=chain_sum data.validation_fraction=0.1": [
        "data.name",
        "has right answers only",
        "data=file or data=hub",
    ],
    "algorithm=dpo policy.dynamic_batching.enabled=true policy.dynamic_batching.train_mb_tokens=40": [
        "policy.dynamic_batching.train_mb_tokens",
        "must hold a pair of sequences",
        "train_mb_tokens=64",
    ],
    "algorithm=sft data.messages_column=chat": ["data.messages_column", "has no such columns"],
    "algorithm=sft algorithm.early_stop_patience=0": ["algorithm.early_stop_patience", "greater than 0"],
    "algorithm=sft algorithm.val_metric=accuracy": ["algorithm.val_metric", "'val_loss'"],
    "algorithm.val_metric=loss": ["algorithm.val_metric", "'accuracy', 'pass_at_k' or 'avg_length'"],
    "algorithm.val_metric=pass_at_k": [
        "algorithm.val_metric",
        "algorithm.val_samples_per_problem=4",
        "1 problem found",
    ],
    "algorithm.val_metric=pass_at_k algorithm.val_samples_per_problem=2 algorithm.higher_is_better=false": [
        *("algorithm.higher_is_better", "worst pass_at_k", "1 problem found"),
    ],
    f"{GPU} offload=cpu_optimizer policy.precision=float32": ["policy.precision", "bfloat16"],
    "checkpoint.save_period=-1": ["checkpoint.save_period", "greater than or equal to 0"],
    "checkpoint.resume_layouts=tensor": ["checkpoint.resume_layouts", "'any' or 'data_parallel'"],
    "checkpoint.keep_newest=0": ["checkpoint.keep_newest", "greater than 0"],
    "checkpoint.must_save_by=soon": ["1 problem", "checkpoint.must_save_by = 'soon'", "[[days:]hours:]minutes:seconds"],
    "policy.sequence_packing.enabled=maybe": ["1 problem", "policy.sequence_packing.enabled = 'maybe'", "'auto'"],
    f"{PEFT}.target_modules=[]": [f"{PEFT}.target_modules", "must not be empty"],
    "policy.model_name=": ["policy.model_name", "must not be empty"],
    "+policy.megatron_cfg.optimizer.learning_rate=1e-4": [f"did you mean {OPTIMIZER}.lr"],
    "algorithm.lr=1e-4": [f"did you mean {OPTIMIZER}.lr"],
    "recipe=grpo-tiny-1n0g-cpu": ["fix: recipes=NAME"],
    "recipes=grpo-qwen3-8b-2n8g-noncolocated cluster.num_nodes=1": [
        "1 problem",
        "generation.colocated.resources.num_nodes = 1",
        "sets 8 of the run's 8 GPUs apart",
    ],
    "run_name=a/b": ["run_name", "must be the name of a folder"],
    "checkpoint.must_save_by=60 checkpoint.save_period=0": ["checkpoint.must_save_by", "saves nothing"],
    "cluster.max_restarts=-1": ["cluster.max_restarts", "greater than or equal to 0"],
    "cluster.phase_timeout_s=0": ["cluster.phase_timeout_s", "greater than or equal to 1"],
    "policy.max_skipped_steps=0": ["policy.max_skipped_steps", "greater than 0"],
    "run_name=../elsewhere": ["run_name"],
    "-m algorithm.sed=1,2": ["algorithm.sed", "did you mean algorithm.seed"],
    "--help policy.lr=1": ["policy.lr", "did you mean"],
    "reward.name=no_such_package.reward": ["reward.name", "there is no module no_such_package"],
}


@pytest.fixture
def places(tmp_path, monkeypatch) -> dict[str, str]:
    """Files the cases name by a capital word."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    experts = tmp_path / "experts"
    shutil.copytree(model, experts)
    own = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8, "vocab_size": 128}
    (experts / "config.json").write_text(json.dumps(MODEL | own))
    for name, change in (
        ("quantized", {"quantization_config": {"quant_method": "fp8"}}),
        ("qwen_moe", own | {"model_type": "qwen3_moe"}),
        ("classifier", {"architectures": ["LlamaForSequenceClassification"]}),
    ):
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(MODEL | change))
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.py").write_text("import os\ndef score(:\n")
    for name in ("own.py", "losses.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pickled = tmp_path / "pickled"
    shutil.copytree(model, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (tmp_path / "LATIN.jsonl").write_bytes('{"prompt": "ä", "answer": "b"}'.encode("latin-1"))
    (tmp_path / "TORN.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "NESTED.jsonl").write_text(json.dumps({"prompt": "x", "answer": {"a": 1}}))
    row = json.dumps({"prompt": "2+2", "answer": "4"})
    files = {"DATA": row, "BROKEN": f"{row}\n{{", "BLANK": "\n", "NULL": json.dumps({"prompt": "x", "answer": None})}
    files |= {"WHOLE": json.dumps({"messages": []}), "TRUE": json.dumps({"prompt": "x", "answer": True})}
    files["EQUAL"] = json.dumps({"prompt": "x", "chosen": "1", "rejected": "1"})
    files["UNENDED"] = "{{ messages"
    files["TWICE"] = '{"prompt": "x", "answer": "1", "answer": "2"}'
    (tmp_path / "ZIPPED.jsonl").write_bytes(gzip.compress(row.encode()))
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    folders = {"MODEL": model, "MOE": experts, "EMPTY": tmp_path / "empty", "PICKLED": pickled}
    folders |= {name: tmp_path / name.lower() for name in ("QUANTIZED", "CLASSIFIER", "QWEN_MOE")}
    paths = folders | {name: tmp_path / f"{name}.jsonl" for name in [*files, "LATIN", "NESTED", "ZIPPED"]}
    return {name: str(path) for name, path in (paths | {"TORN": tmp_path / "TORN.parquet"}).items()}


def test_there_are_at_least_sixty_cases():
    assert len(CASES) >= 60


@pytest.mark.parametrize("arguments", CASES)
def test_bad_config(arguments, places, capsys, tmp_path):
    words = [_place(word, places) for word in split(arguments)]
    with pytest.raises(SystemExit) as exit_:
        train.main(words)
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.err.startswith("configuration error: ")
    assert "Traceback" not in captured.err + captured.out
    assert "fix: " in captured.err
    for expected in CASES[arguments]:
        assert expected in captured.err
    assert not (tmp_path / "outputs").exists(), "a bad configuration must not leave a run folder"


@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["-m", "algorithm.seed=1,2"]])
@pytest.mark.parametrize(("address", "words"), [("nonsense", "is no HOST:PORT"), ("127.0.0.1:9", "does not answer")])
def test_an_address_of_ray_that_nothing_answers_at(address, words, flags, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SystemExit) as exit_:
        train.main(flags)
    message = capsys.readouterr().err
    assert exit_.value.code == 2 and f"RAY_ADDRESS = '{address}'" in message and words in message


COPIES = {
    "torchrun": {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8"},
    "srun": {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"},
    "srun without its step": {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "2"},
}


@pytest.mark.parametrize("starter", COPIES)
def test_another_launcher_that_starts_the_command_several_times(starter, monkeypatch, capsys):
    for name, value in COPIES[starter].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_:
        train.main(["--dry-run"])
    message = capsys.readouterr().err
    assert (
        exit_.value.code == 2 and starter.split()[0] in message and "one launcher starts all of its workers" in message
    )


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


RUN, SWEEP = ["hydra.run.dir="], ["--dry-run", "-m", "algorithm.seed=1,2", "hydra.sweep.dir="]
INSIDE = [(flags, place) for place in ("checkpoints", "checkpoints/new", "plots/new") for flags in (RUN, SWEEP)]
# A run resumes in its own folder, where a sweep would put its jobs.
INSIDE += [(["--dry-run", *RUN], "checkpoints/step-00000007"), (SWEEP, ".")]


@pytest.mark.parametrize(("flags", "place"), INSIDE)
def test_a_folder_inside_another_run(flags, place, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000007").mkdir(parents=True)
    for name in ("status.json", "config.json"):
        (run / name).write_text("{}")
    with pytest.raises(SystemExit) as exit_:
        train.main([*flags[:-1], f"{flags[-1]}{run / place}"])
    message = capsys.readouterr().err
    assert exit_.value.code == 2 and f"inside the folder of another run, {run}" in message
    assert ("among its checkpoints" in message) == place.startswith("checkpoints")
    assert f"hydra.run.dir={run}; or" in message and not (run / "plots").exists()


def test_everything_is_reported_at_once(places, capsys):
    arguments = [
        "polcy=megatron",
        "policy.lr=1",
        "algorithm.seed=abc",
        "generation.top_p=2",
        "policy.logprob_batch_size=48",
        "reward.name=vibes",
        f"{OPTIMIZER}.min_lr=1",
        "data.name=squad",
    ]
    with pytest.raises(SystemExit):
        train.main(arguments)
    message = capsys.readouterr().err
    assert "8 problems found" in message
    keys = ("polcy", "policy.lr", "algorithm.seed", "generation.top_p", "policy.logprob_batch_size", "reward.name")
    for key in (*keys, f"{OPTIMIZER}.min_lr", "data.name"):
        assert f". {key}" in message


def test_a_wrong_type_does_not_break_rules_that_read_it(capsys):
    with pytest.raises(SystemExit):
        train.main(["policy.train_global_batch_size=many", "algorithm.num_prompts_per_step=3", "generation.top_k=0"])
    message = capsys.readouterr().err
    assert "must be an integer" in message and "generation.top_k" in message and "2 problems found" in message
    assert "must divide the rollout's 24 samples (3 prompts" not in message


def split(arguments: str) -> list[str]:
    """Into words, at blanks that are not in quotes."""
    return re.split(r" (?![^']*'(?:[^']*'[^']*')*[^']*$)", arguments)


def _place(word: str, places: dict[str, str]) -> str:
    key, equals, value = word.partition("=")
    return f"{key}{equals}{places.get(value, value)}"
