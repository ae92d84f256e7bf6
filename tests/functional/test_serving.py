"""An agent trains through the endpoint, and what it has trained is served: whole commands on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from nemo_rl_lite.models.embedded import build_tokenizer
from nemo_rl_lite.rollout.store import read_rollout
from nemo_rl_lite.system.machine import free_port
from tests.functional.conftest import PYTHONPATH, run_command
from tests.functional.here import train_here

pytestmark = pytest.mark.functional

SMALL = (
    *("algorithm.max_num_steps=2", "algorithm.num_prompts_per_step=4", "algorithm.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=16", "algorithm.max_val_samples=8", "algorithm.val_period=0"),
    *("generation=transformers", "policy.max_total_sequence_length=128", "generation.max_new_tokens=40"),
)
AGENT = ("agent.name=tests.unit.rollout.players.player", "+agent.kwargs.how='two turns'", "agent.processes=1")
# The run's model is that of its checkpoint.
SAVED = ("checkpoint.save_period=2", "checkpoint.export_hf_at_end=false", "generation.serve.enabled=true")
SAVED += ("policy.megatron_cfg.peft.enabled=true",)
# The model's template writes `=` after a message, and this one writes it twice where it is told to.
TEMPLATE = build_tokenizer().chat_template.replace("{% else %}=", "{% else %}={% if twice %}={% endif %}")


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder) -> tuple[Path, str, list[dict]]:
    """The run's folder, what it said, its metrics."""
    folder = tmp_path_factory.mktemp("runs") / "agent"
    (template := folder.parent / "own.jinja").write_text(TEMPLATE)
    chat = (f"policy.tokenizer.chat_template={template}", "policy.tokenizer.chat_template_kwargs.twice=true")
    done = train_here(folder, model_folder, *SMALL, *AGENT, *SAVED, *chat)
    # The run has its own copy.
    template.unlink()
    return folder, *done


def test_an_agents_tokens_have_the_policys_logprobs(run):
    folder, said, metrics = run
    steps = [line for line in metrics if "train/loss" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["train/avg_turns_per_sample"] == 2 and step["train/environment_errors"] == 0
        assert step["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
        assert step["timing/rollout/environment_mean"] > 0
    rows = read_rollout(folder / "rollouts" / "step-00000001-train.parquet")
    assert {tuple(turn["role"] for turn in row["turns"]) for row in rows} == {("assistant", "user", "assistant")}
    # A token for each character, and one for the start.
    assert all(row["prompt_tokens"] == len(f"^{row['prompt'][0]['content']}==") for row in rows)
    assert "during rollouts; the token is in" in said and not (folder / "endpoint.json").exists()


def test_agents_and_a_client_ask_rollout_workers(tmp_path, model_folder):
    folder, two = tmp_path / "run", ("generation.data_parallel_size=2", "algorithm.rollouts.num_workers=2")
    apart = ("generation.colocated.enabled=false", "generation.serve.enabled=true", "algorithm.max_num_steps=6")
    port = free_port()
    apart += ("generation.serve.host=0.0.0.0", f"generation.serve.port={port}")
    command = run_command(folder, model_folder, "logger.plots=false", *SMALL, *AGENT, *two, *apart)
    body, answers = {"messages": [{"role": "user", "content": "7310"}], "max_tokens": 4}, []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": PYTHONPATH}
    ) as process:
        while process.poll() is None and not answers:
            time.sleep(0.05)
            with suppress(OSError, ValueError, httpx.HTTPError):
                given = json.loads((folder / "endpoint.json").read_text())
                assert httpx.URL(given["base_url"]).port == port
                keys = {"Authorization": f"Bearer {given['api_key']}"}
                with httpx.Client(base_url=given["base_url"], headers=keys, trust_env=False, timeout=60) as client:
                    answers = [one for one in [client.post("/chat/completions", json=body)] if one.status_code == 200]
        said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert answers and answers[0].json()["usage"]["completion_tokens"] <= 4
    assert "the first rollout worker serves during rollouts" in said and not (folder / "endpoint.json").exists()
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(one["train/avg_turns_per_sample"] == 2 for one in steps if "train/loss" in one)
    assert all(one["train/environment_errors"] == 0 for one in steps if "train/loss" in one)
    assert len(list(folder.glob("rollouts/step-00000001-*-train.parquet"))) == 2


def test_its_checkpoint_is_served_until_it_is_told_to_stop(run):
    folder, _, _ = run
    command = [sys.executable, "-m", "nemo_rl_lite.serve", str(folder), "--max-new-tokens", "6"]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "VLLM_API_KEY": "my-own-key"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            lines = [server.stdout.readline() for _ in range(4)]
            assert all(lines), server.communicate()[1][-3000:]
            given = dict(line.strip().split("=", 1) for line in lines)
            url, keys = given["OPENAI_BASE_URL"], {"Authorization": f"Bearer {given['OPENAI_API_KEY']}"}
            body = {"messages": [{"role": "user", "content": "7310"}], "temperature": 0, "logprobs": True}
            with httpx.Client(base_url=url, headers=keys, trust_env=False, timeout=120) as client:
                answers = [client.post("/chat/completions", json=body).json() for _ in range(2)]
                two = client.post("/chat/completions", json=body | {"n": 2, "temperature": 1, "seed": 3}).json()
                tools = {"tools": [{"type": "function", "function": {"name": "add"}}]}
                offered = client.post("/chat/completions", json=body | tools).json()
                prompt = {"prompt": answers[0]["prompt_token_ids"], "temperature": 0, "logprobs": 1}
                continued = client.post("/completions", json=prompt).json()
                limited = client.post("/chat/completions", json=body | {"max_tokens": 7}).json()
                own = {"model": answers[0]["model"], "input": "7310", "temperature": 0}
                response = client.post("/responses", json=own).json()
            plain = {"messages": body["messages"], "temperature": 0}
            asked = {"x-api-key": given["ANTHROPIC_AUTH_TOKEN"]}
            with httpx.Client(base_url=given["ANTHROPIC_BASE_URL"], headers=asked, trust_env=False) as client:
                message = client.post("/v1/messages", json=plain | {"max_tokens": 7}, timeout=120).json()
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    first, second = (one["choices"][0] for one in answers)
    assert first["token_ids"] == second["token_ids"] and 0 < len(first["token_ids"]) <= 6
    assert all(one["logprob"] <= 0 for one in first["logprobs"]["content"])
    assert [one["index"] for one in two["choices"]] == [0, 1]
    assert given["OPENAI_API_KEY"] == "my-own-key"
    more = offered["usage"]["prompt_tokens"] - answers[0]["usage"]["prompt_tokens"]
    assert more == len("<tool=add()>") and offered["choices"][0]["message"]["content"]
    assert continued["choices"][0]["token_ids"] == first["token_ids"]
    assert limited["choices"][0]["token_ids"] == first["token_ids"]
    said = first["message"]["content"]
    assert response["output"][0]["content"][0]["text"] == said == "".join(part["text"] for part in message["content"])
    assert (folder / "hf-step-00000002" / "chat_template.jinja").read_text() == TEMPLATE
    adapters = folder / "adapter-step-00000002"
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {one.name for one in adapters.iterdir()}
