"""vLLM and the transformers engine: exact logprobs, seeds, stop conditions, and new weights through a refit."""

import pickle
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.broadcast import RefitReport, send
from nemo_rl_lite.refit.packing import dtype_name
from nemo_rl_lite.refit.plan import RefitPlan, make_plan

pytestmark = pytest.mark.functional

LEFT_OUT = "model.layers.2.self_attn.k_norm.weight"


@pytest.fixture(scope="module")
def new_model(model_folder):
    """Other weights for the same model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def seen(request, model_folder, new_model, engine_environment, tmp_path_factory):
    """What an engine process saw (engine_process.py); this process is the producer of its refit."""
    folder = tmp_path_factory.mktemp(request.param)
    weights = [(name, weight.detach()) for name, weight in new_model.named_parameters()]
    partial = [(name, weight) for name, weight in weights if name != LEFT_OUT]
    plans = {"": plan_of(weights), ".partial": plan_of(partial)}
    assert len(plans[""].buckets) > 3
    for name, plan in plans.items():
        (folder / f"plan{name}").write_bytes(pickle.dumps(plan))
    script = Path(__file__).with_name("engine_process.py")
    arguments = [request.param, model_folder, folder / "plan", folder / "seen"]
    command = [sys.executable, str(script), *map(str, arguments)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=engine_environment, stdout=log, stderr=subprocess.STDOUT)

    def produce(name: str, tensors: list) -> RefitReport:
        port_file = folder / f"seen.port{name}"
        while not port_file.exists():
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            time.sleep(0.1)
        limit = timedelta(seconds=60)
        store = TCPStore(
            "127.0.0.1", int(port_file.read_text()), is_master=False, wait_for_workers=False, timeout=limit
        )
        return send(plans[name], tensors, refit_group.join(store, 0, 2, 60), verify=True)

    sent = produce("", weights)
    produce(".partial", partial)
    assert process.wait(60) == 0, (folder / "log").read_text()[-4000:]
    return pickle.loads((folder / "seen").read_bytes()) | {"sent": sent}


def plan_of(weights: list) -> RefitPlan:
    return make_plan([(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in weights], bucket_bytes=300_000)


def scores(model, prompt, completion, temperature: float) -> torch.Tensor:
    """Logprobs of a completion under a transformers model."""
    tokens = torch.tensor([[*prompt, *completion.tokens]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None]).squeeze(-1)


def check_logprobs(model, prompts, completions, temperature: float) -> None:
    samples = len(completions) // len(prompts)
    for index, completion in enumerate(completions):
        expected = scores(model, prompts[index // samples], completion, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_logprobs_are_those_of_the_sampled_distribution(seen, model_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    assert len(seen["sampled"]) == 12
    check_logprobs(model, seen["prompts"], seen["sampled"], temperature=0.8)


def test_a_seed_repeats_and_another_does_not(seen):
    assert seen["sampled"] == seen["again"]
    assert seen["sampled"] != seen["other seed"]


def test_greedy_is_the_most_probable_token(seen):
    assert [completion.tokens for completion in seen["greedy"]] == [completion.tokens for completion in seen["top k"]]


def test_stop_tokens_end_a_response_and_are_part_of_it(seen):
    for completion in seen["stops"]:
        stopped = [token in range(2, 34) for token in completion.tokens]
        assert not any(stopped[:-1])
        assert stopped[-1] == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.tokens) == 8
    assert any(completion.finish_reason == "stop" for completion in seen["stops"])
    assert all(len(completion.tokens) == len(completion.logprobs) for completion in seen["stops"])


def test_stop_strings_end_a_response(seen):
    from nemo_rl_lite.embedded.reverse_digits import TOKENS

    stops = {TOKENS.index(letter) for letter in "ab1"}
    for completion in seen["stop string"]:
        assert not stops.intersection(completion.tokens[:-1])
        if completion.tokens[-1] in stops:
            assert completion.finish_reason == "stop"
    assert any(completion.tokens[-1] in stops for completion in seen["stop string"])


def test_after_a_refit_the_engine_is_the_new_model(seen, new_model):
    assert seen["checksums"] == seen["sent"].checksums
    assert set(seen["seconds"]) == {"transfer", "load"}
    check_logprobs(new_model, seen["prompts"], seen["refitted"], temperature=1.0)


def test_a_weight_that_the_producer_left_out_is_an_error(seen):
    assert "left 1 weights of the engine as they were" in seen["partial"]
    assert LEFT_OUT in seen["partial"]
