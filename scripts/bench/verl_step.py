"""Measure verl's GRPO step on the task of `trl_step.py grpo`, with vLLM on the same GPU.

verl_step.py MODEL --times FILE [--settings JSON ...] [--steps 1] [--lora DIM] [--dry-run]

Needs `verl` in addition to this project's packages. A setting has `tokens` (limit of a micro-batch), `recompute`,
`attention`, `fused` (loss from hidden states) and `backend` (`fsdp`, `fsdp2` or `megatron`). Megatron and
FlashAttention train without padding. Settings that differ in tokens alone share a launch. FILE gets the step times of
each setting without its first step, and the errors of settings. Sampling logprobs serve as old logprobs, so there is no
logprob pass. Master weights are float32.
"""

import argparse
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import record
from sum_task import sums
from trl_step import NEW, PROMPTS, RESPONSES
from whole_runs import Times, label, tiny_model

RATE, LONGEST_PROMPT = 5e-6, 128
# cuDNN's attention, by Transformer Engine.
PLAIN = {"recompute": False, "attention": "fused", "fused": True, "backend": "megatron"}
SHARDED = PLAIN | {"attention": "flash_attention_4", "backend": "fsdp"}
SETTINGS = [one | {"tokens": tokens} for one in (PLAIN, PLAIN | {"fused": False}, SHARDED) for tokens in (16384, 32768)]
PHASES = {"gen": "generation", "update_actor": "train", "update_weights": "refit"}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, nargs="+", default=SETTINGS)
    parser.add_argument("--steps", type=int, default=1, help="that count, of each setting")
    parser.add_argument("--lora", type=int, metavar="DIM")
    parser.add_argument("--dry-run", action="store_true", help="compose verl's configuration, and train nothing")
    given = parser.parse_args(arguments)
    times = Times(given.times)
    for _, group in itertools.groupby(given.settings, lambda one: one | {"tokens": 0}):
        settings = list(group)
        try:
            _launch(given, settings, times)
        except Exception as error:
            times.skip(next(one for one in settings if label(one) not in times.steps), error)


def _launch(given: argparse.Namespace, settings: list[dict[str, Any]], times: Times) -> None:
    """Train with settings that differ in tokens alone, each for a step that does not count and those that do."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import validate_config

    of_step = [one for one in settings for _ in range(1 + given.steps)]
    with tempfile.TemporaryDirectory() as folder, initialize_config_module("verl.trainer.config", version_base=None):
        rows = _write_rows(Path(folder), PROMPTS * len(of_step))
        overrides = _overrides(given, settings[0], len(of_step), rows)
        config = compose("ppo_megatron_trainer" if settings[0]["backend"] == "megatron" else "ppo_trainer", overrides)
        validate_config(config, use_reference_policy=False, use_critic=False)
        if given.dry_run:
            return
        os.environ |= {"HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_PATH": f"{folder}/steps.jsonl"}
        with _followed(Path(folder) / "steps.jsonl", of_step, times):
            _train(config, [one["tokens"] for one in of_step])


def _train(config: Any, tokens: list[int]) -> None:
    """Run verl's trainer, with these limits of a micro-batch, one for each step."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    class Runner(TaskRunnerV1.__ray_metadata__.modified_class):
        def run(self, config: Any) -> None:
            from verl.trainer.ppo.v1 import PPOTrainerSync

            def update_actor(self: Any, batch: Any, metrics: Any, update: Any = PPOTrainerSync._update_actor) -> Any:
                batch.extra_info["max_token_len_per_gpu"] = tokens[self.global_steps - 1]
                return update(self, batch, metrics)

            PPOTrainerSync._update_actor = update_actor
            super().run(config)

    try:
        run_ppo(config, ray.remote(Runner))
    finally:
        ray.shutdown()


def _overrides(given: argparse.Namespace, setting: dict[str, Any], steps: int, rows: Path) -> list[str]:
    actor, model, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
    flash, megatron = setting["attention"].startswith("flash"), setting["backend"] == "megatron"
    # A core for each of verl's actors would be more than a small machine has.
    keys = [
        *("algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=true"),
        *(f"data.train_files={rows}", f"data.val_files={rows}", f"data.train_batch_size={PROMPTS}"),
        *(
            f"data.max_prompt_length={LONGEST_PROMPT}",
            f"data.max_response_length={NEW}",
            "data.dataloader_num_workers=0",
        ),
        *(f"{model}.path={given.model.resolve()}", f"{model}.use_remove_padding={flash or megatron}"),
        *(f"{actor}.ppo_mini_batch_size={PROMPTS}", f"{actor}.optim.lr={RATE}", f"{actor}.use_dynamic_bsz=true"),
        *(f"{actor}.ppo_max_token_len_per_gpu={setting['tokens']}", f"{actor}.use_kl_loss=false"),
        *(f"{rollout}.name=vllm", f"{rollout}.n={RESPONSES}", f"{rollout}.tensor_model_parallel_size=1"),
        *(f"{rollout}.gpu_memory_utilization=0.4", f"{rollout}.max_num_seqs={PROMPTS * RESPONSES}"),
        *(f"{rollout}.max_model_len=1024", f"{rollout}.ignore_eos=true"),
        *(f"reward.custom_reward_function.path={Path(__file__).with_name('sum_task.py')}", "reward.num_workers=2"),
        *("ray_kwargs.ray_init.num_cpus=64", "transfer_queue.backend.SimpleStorage.num_data_storage_units=2"),
        *("trainer.n_gpus_per_node=1", "trainer.logger=[console,file]", f"trainer.total_training_steps={steps}"),
        *("trainer.val_before_train=false", "trainer.resume_mode=disable", "trainer.total_epochs=1"),
    ]
    if megatron:
        transformer = f"{actor}.megatron.override_transformer_config"
        keys += [f"{actor}.megatron.use_mbridge=true", f"{model}.use_fused_kernels={setting['fused']}"]
        # The fusion needs a kernel of Apex.
        keys += [f"{transformer}.attention_backend={setting['attention']}"]
        keys += [f"+{transformer}.gradient_accumulation_fusion=false"]
        if setting["recompute"]:
            keys += [f"{transformer}.recompute_granularity=full", f"{transformer}.recompute_method=uniform"]
            keys += [f"{transformer}.recompute_num_layers=1"]
    else:
        keys += [
            f"{actor}.strategy={setting['backend']}",
            f"{model}.enable_gradient_checkpointing={setting['recompute']}",
            f"+{model}.override_config.attn_implementation={setting['attention']}",
            f"{model}.external_lib={'verl_flash' if setting['attention'] == 'flash_attention_4' else 'null'}",
            *(f"{model}.use_fused_kernels={setting['fused']}", f"{model}.fused_kernel_options.impl_backend=triton"),
        ]
    if given.lora is not None:
        keys += [f"{model}.lora_rank={given.lora}", f"{model}.lora_alpha={2 * given.lora}"]
        keys += [f"{rollout}.load_format=safetensors"]
    return keys


def _write_rows(folder: Path, count: int) -> Path:
    """Write the questions as verl reads them."""
    from datasets import Dataset

    rows = [
        {"prompt": row["prompt"], "data_source": "sums", "reward_model": {"ground_truth": row["answer"]}}
        for row in sums(count)
    ]
    Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


@contextmanager
def _followed(log: Path, of_step: Sequence[dict[str, Any]], times: Times) -> Iterator[None]:
    """In the block, keep each step when verl logs it, because a killed run has steps too."""
    ends = threading.Event()

    def follow() -> None:
        kept, last = 0, False
        while not last:
            last = ends.wait(1)
            steps = _read(log)
            for one, step in zip(of_step[kept:], steps[kept:], strict=False):
                times.add(one, step)
            kept = len(steps)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _read(log: Path) -> list[dict[str, float]]:
    """Return the step times and phase times that verl logged."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    steps = [json.loads(line)["data"] for line in lines if line.endswith("\n")]
    names = {"step": "step time"} | PHASES
    return [{name: one[f"timing_s/{key}"] for key, name in names.items() if f"timing_s/{key}" in one} for one in steps]


def trial() -> None:
    """Write rows, and read a log; compose verl's configuration where it is installed."""
    from importlib.util import find_spec

    own = Path(os.environ["NRL_BENCH_OUT"])
    log, times = own / "steps.jsonl", Times(own / "verl.times")
    log.write_text('{"step": 1, "data": {"timing_s/step": 2.0, "timing_s/gen": 1.0}}\n' * 2)
    _write_rows(own, 2)
    with _followed(log, [SETTINGS[0]] * 2, times):
        pass
    if find_spec("verl"):
        main([str(tiny_model()), "--times", str(own / "dry.times"), "--dry-run"])
    results = [record.result(name, "verl", "s", found) for name, found in times.steps[label(SETTINGS[0])].items()]
    record.write("peers-verl", results, [])


if __name__ == "__main__":
    record.start(main, trial)
