"""A run with several sources: shares, limits, environments and agents by source, turns, rollout workers, and resume."""

import json
from collections import Counter
from pathlib import Path

import pytest

from nemo_rl_lite.rollout.store import read_rollout, rollout_files, step_of
from tests.functional.conftest import train
from tests.functional.here import train_here
from tests.functional.test_resume import metrics_of
from tests.functional.test_turn_credit import rows_of

pytestmark = pytest.mark.functional

AGENT = """
import json
import urllib.request


def play(problem, endpoint):
    body = {"model": endpoint.model, "messages": list(problem.messages)}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", json.dumps(body).encode(), headers)
    text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    return len(set(text) & set(problem.answer)) / 4


def share(response, answer):
    return len(set(response) & set(answer)) / 4
"""
STEPS, PROMPTS = 4, 4


def mixture(folder: Path) -> list[str]:
    code, rows = folder / "code.py", folder / "rows.jsonl"
    code.write_text(AGENT)
    rows.write_text("".join(json.dumps({"prompt": f"{n}", "answer": f"{n}"[::-1]}) + "\n" for n in range(10, 22)))
    return [
        f"reward.name={code}:share",
        "data.sources.digits.weight=0.5",
        "data.sources.digits.environment.name=tests.functional.digits.Digits",
        "data.sources.digits.environment.max_turns=3",
        f"data.sources.played.agent={code}:play",
        "data.sources.played.weight.solve_rate={0:1.0,1:0.5}",
        f"data.sources.short.train_path={rows}",
        "data.sources.short.reward=last_number",
        "data.sources.short.max_new_tokens=2",
        f"data.sources.short.weight.step={{1:1.0,{STEPS}:3.0}}",
        *("algorithm.credit=turn", "policy.max_total_sequence_length=96"),
        *("algorithm.max_val_samples=4", f"algorithm.num_prompts_per_step={PROMPTS}"),
        *("algorithm.num_generations_per_prompt=4", "policy.train_global_batch_size=16"),
        *("algorithm.use_dynamic_sampling=true", "algorithm.dynamic_sampling_max_gen_batches=2"),
        *("algorithm.oversample=1.0", "generation.colocated.enabled=false", "generation=transformers"),
    ]


def sources_of(folder: Path) -> dict[int, Counter]:
    """Number of prompts of each source by step, and a check of the samples' limits."""
    files = [file for file in rollout_files(folder) if file.name.endswith("-train.parquet")]
    rows = [row for file in files for row in read_rollout(file)]
    assert all(row["tokens"] <= 2 for row in rows if row["source"] == "short")
    return {step_of(file): Counter(row["source"] for row in read_rollout(file)[::4]) for file in files}


def nearly(metrics: dict) -> object:
    """These metrics up to rounding: the timing of an agent's requests decides which ones share a batch."""
    return pytest.approx(metrics, abs=1e-4)


def test_a_mixture_resumes_like_one_that_was_not_stopped_and_workers_play_the_same(tmp_path, model_folder):
    common = [*mixture(tmp_path), "algorithm.val_period=2", "checkpoint.save_period=2"]
    whole, halves, workers = (tmp_path / name for name in ("whole", "halves", "workers"))
    output, _ = train_here(whole, model_folder, *common, f"algorithm.max_num_steps={STEPS}")
    assert "reward of digits" in output
    by_step = sources_of(whole)
    assert [own.total() for own in by_step.values()] == [PROMPTS] * STEPS
    assert set(sum(by_step.values(), Counter())) == {"digits", "played", "short"}
    metrics = metrics_of(whole)
    assert metrics[STEPS, "train/source/short/weight"] == 3 and metrics[1, "train/source/short/weight"] == 1
    assert {name.split("/")[2] for step, name in metrics if "validation/source" in name} == {
        "digits",
        "played",
        "short",
    }
    shares = [value for (step, name), value in metrics.items() if step == 2 and name.endswith("/prompt_share")]
    assert sum(shares) == pytest.approx(1.0)

    saved = whole / "checkpoints" / "step-00000002"
    train_here(halves, model_folder, *common, f"algorithm.max_num_steps={STEPS}", f"checkpoint.resume_from={saved}")
    # The resumed run has no record of the validation after step 2, and repeats it.
    begins = (2, "validation/")
    assert metrics_of(halves) == nearly({key: value for key, value in metrics.items() if key >= begins})

    two = ["generation.data_parallel_size=2", "algorithm.rollouts.num_workers=2"]
    train(workers, model_folder, *common, *two, f"algorithm.max_num_steps={STEPS}")
    found = metrics_of(workers)
    assert sources_of(workers) == by_step and found == nearly(metrics)
    # They credit turns like the launcher.
    rows, by_workers = rows_of(whole, 1), rows_of(workers, 1)
    assert max(len(row["turn_rewards"]) for row in rows) > 1
    for name in ("token_ids", "turn_rewards", "token_advantages"):
        assert [row[name] for row in by_workers] == [row[name] for row in rows], name
    norms = [one[1, "train/grad_norm"] for one in (metrics, found)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0


def test_an_asynchronous_run_resumes_with_sources_and_without(tmp_path, model_folder):
    common = ["async=queue", "generation=transformers", "generation.colocated.enabled=false"]
    common += ["checkpoint.save_period=1", "checkpoint.keep_newest=3", "algorithm.max_num_steps=3"]
    sources = ["data.sources.one.weight=2", "data.sources.other.weight=1"]
    train_here(tmp_path / "plain", model_folder, *common)
    saved = tmp_path / "plain" / "checkpoints" / "step-00000001"
    for step, own, name in ((2, sources, "mixed"), (3, [], "plain again")):
        assert json.loads((saved / "checkpoint.json").read_text())["record"]["rollouts"]["ahead"]
        output, _ = train_here(tmp_path / name, model_folder, *common, *own, f"checkpoint.resume_from={saved}")
        assert f"data.sources: step {step} begins with the first prompts" in output
        saved = tmp_path / name / "checkpoints" / "step-00000002"
