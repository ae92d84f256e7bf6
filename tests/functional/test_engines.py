"""vLLM and the transformers engine: exact logprobs, seeds, stop conditions, and new weights through a refit."""

import json
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.interface import Request, RequestError, Sampling
from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.buckets import BroadcastBuffers, SharedBuffer, Stream, bucket_transport
from nemo_rl_lite.refit.engine import Source
from nemo_rl_lite.refit.group import Rendezvous
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.refit.layout import RefitPlan, dtype_name, make_plan
from nemo_rl_lite.validation.compose import compose_config
from tests.functional.ranks import run_script, start_script

pytestmark = pytest.mark.functional

CPU = torch.device("cpu")
# Seconds for all that an engine does, from its first import on.
LIMIT_S = 240
LEFT_OUT = "model.layers.2.self_attn.k_norm.weight"


@pytest.fixture(scope="module")
def new_model(model_folder):
    """Other weights for the same model."""
    model = load(model_folder)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    return model.eval()


SPECULATION = "{method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1, prompt_lookup_max: 2}"
# The engines, each with its options.
ENGINES = {
    "vllm": ("vllm", []),
    "transformers": ("transformers", []),
    "vllm that speculates": (
        "vllm",
        ["generation.pause_drafts=false", f"+generation.vllm_kwargs.speculative_config={SPECULATION}"],
    ),
}


@pytest.fixture(scope="module", params=ENGINES)
def seen(request, model_folder, new_model, engine_environment, tmp_path_factory):
    """What an engine process saw (engine_process.py); this process is the producer of its refit."""
    folder = tmp_path_factory.mktemp("engine")
    backend, options = ENGINES[request.param]
    weights = [(name, weight.detach()) for name, weight in new_model.named_parameters()]
    partial = [(name, weight) for name, weight in weights if name != LEFT_OUT]
    old = [(name, weight.detach()) for name, weight in load(model_folder).named_parameters()]
    assert len(plan_of(weights).buckets) > 3
    # As policy ranks do: on the same device through a shared buffer, and over sockets.
    refits = [
        Producer("", weights, shared=True),
        Producer(".broadcast", old),
        Producer(".partial", partial),
        Producer(".whole", old),
    ]
    if backend == "vllm":
        refits += [Producer(".midway", weights), Producer(".old", old), Producer(".midway again", weights)]
    if options:
        refits.append(Producer(".speculating", old))
    for producer in refits:
        (folder / f"source{producer.name}").write_bytes(pickle.dumps(producer.sources[0]))
    script = Path(__file__).with_name("engine_process.py")
    arguments = [backend, model_folder, folder / "source", folder / "seen", *options]
    sent = refitted(script, arguments, engine_environment, folder / "log", refits)
    return pickle.loads((folder / "seen").read_bytes()) | sent


def refitted(script: Path, arguments: Sequence, environ: dict[str, str], log: Path, refits: list) -> dict:
    """Run an engine's script to its end, and take part in its refits; the report of each."""
    process = start_script(script, arguments, environ, log)
    try:
        sent = {f"sent{producer.name}": producer.send() for producer in refits}
        process.join(LIMIT_S)
        assert process.exitcode == 0
    except (AssertionError, RuntimeError, RefitError) as error:
        raise AssertionError(log.read_text()[-4000:]) from error
    finally:
        process.kill()
    return sent


class Producer:
    """The policy's side of one refit, to an engine of so many ranks."""

    def __init__(self, name: str, weights: list, shared: bool = False, ranks: int = 1):
        self.name, self._weights, self._plan, self._size = name, weights, plan_of(weights), 1 + ranks
        self._store = refit_group.host_store("127.0.0.1", LIMIT_S)
        buffers = SharedBuffer(self._plan, CPU) if shared else BroadcastBuffers(self._plan, 2, CPU)
        self._transport = bucket_transport(self._plan, buffers, "full", Stream(self._plan, lambda: self._weights))
        settings = compose_config([f"refit.timeout_s={LIMIT_S}"]).refit
        places = [Rendezvous("127.0.0.1", self._store.port, rank, self._size) for rank in range(1, self._size)]
        self.sources = [Source(self._plan, settings, place, self._transport.offer()) for place in places]

    def send(self) -> RefitReport:
        return self._transport.sender(refit_group.join(self._store, 0, self._size, CPU, LIMIT_S)).send()


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


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
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_logprobs_are_those_of_the_sampled_distribution(seen, model_folder):
    assert len(seen["sampled"]) == 12
    check_logprobs(load(model_folder).eval(), seen["prompts"], seen["sampled"], temperature=0.8)


def test_steps_and_cached_tokens_are_counted_without_those_of_a_probe(seen):
    """The token after k others of a response meets these and its prompt in the cache; the first one's pass is its
    prompt's."""
    lengths = [len(one.tokens) for one in seen["sampled"]]
    prompts = [len(prompt) for prompt in seen["prompts"] for _ in range(4)]
    met = [prompt + k for prompt, length in zip(prompts, lengths, strict=True) for k in range(1, length)]
    assert seen["decoded before"].steps and seen["decoded"].cached == sum(met)
    assert max(lengths) <= seen["decoded"].steps <= max(lengths) + 2


def test_a_seed_repeats_and_another_does_not(seen):
    assert seen["sampled"] == seen["again"]
    assert seen["sampled"] != seen["other seed"]


def test_neither_the_order_of_requests_nor_others_that_are_taken_back_change_a_response(seen):
    sampled = [one.tokens.tolist() for one in seen["sampled"]]
    assert [seen["backwards"][number].tokens.tolist() for number in range(12)] == sampled
    numbers, left = seen["aborted"]
    assert numbers == list(range(1, 12, 2))
    assert [one.tokens.tolist() for one in left] == [sampled[number] for number in numbers]


def test_a_response_names_the_version_of_its_weights(seen):
    of = {name: {version for one in seen[name] for version, _ in one.versions} for name in ("sampled", "refitted")}
    assert of == {"sampled": {0}, "refitted": {3}}


def test_greedy_is_the_most_probable_token(seen, model_folder):
    model = load(model_folder).eval()
    for prompt, completion in zip(seen["prompts"], seen["greedy"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        assert list(completion.tokens) == logits.argmax(-1).tolist()
    greedy, top_k = ([one.tokens.tolist() for one in seen[name]] for name in ("greedy", "top k"))
    assert greedy == top_k


@pytest.mark.parametrize("name", ["min p", "truncated"])
def test_logprobs_are_of_the_tokens_that_truncation_leaves(seen, model_folder, name):
    """Keep tokens with a share of the largest probability, of these the five most likely, of these the first 90 %."""
    model, smallest = load(model_folder).eval(), seen["smallest share"]
    for prompt, completion in zip([one for one in seen["prompts"] for _ in range(4)], seen[name], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        for row, token, logprob in zip(logits, completion.tokens, completion.logprobs, strict=True):
            chances, order = (row / 0.8).softmax(-1).sort(descending=True)
            left = chances >= smallest * chances[0]
            if name == "truncated":
                left &= torch.arange(len(left)) < 5
                of_left = torch.where(left, chances, 0.0) / chances[left].sum()
                left &= of_left.cumsum(0) - of_left < 0.9
            place = order.tolist().index(token)
            assert left[place] and logprob == pytest.approx(
                (chances[place] / chances[left].sum()).log().item(), abs=1e-3
            )


def test_served_options_change_the_response_or_are_rejected(seen):
    if "options" not in seen:
        pytest.skip("the transformers engine takes none")
    likely, penalised, rejected = seen["options"]
    for plain, one, other in zip(seen["greedy"], likely, penalised, strict=True):
        assert one.tokens.tolist() == plain.tokens.tolist()
        assert [len(top) for top in one.top_logprobs] == [3] * len(one.tokens)
        pairs = list(zip(one.tokens.tolist(), one.logprobs.tolist(), strict=True))
        assert [top[0] for top in one.top_logprobs] == pairs and one.top_logprobs[0][1][1] <= pairs[0][1]
        assert other.logprobs[0] == plain.logprobs[0] and other.logprobs[1] != plain.logprobs[1]
    assert {type(one) for one in rejected} == {RequestError}


def test_stop_tokens_end_a_response_and_are_part_of_it(seen):
    for completion in seen["stops"]:
        stopped = [token in range(2, 34) for token in completion.tokens]
        assert not any(stopped[:-1])
        assert stopped[-1] == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.tokens) == 8
    assert any(completion.finish_reason == "stop" for completion in seen["stops"])
    assert all(len(completion.tokens) == len(completion.logprobs) for completion in seen["stops"])


def test_without_stop_tokens_the_models_own_end_token_ends_nothing(seen):
    """As a refit's probe wants it: as long from every engine."""
    assert {len(completion.tokens) for completion in seen["nothing stops"]} == {20}
    assert any(2 in completion.tokens for completion in seen["nothing stops"])


def test_stop_strings_end_a_response(seen):
    from nemo_rl_lite.models.embedded import TOKENS

    stops = {TOKENS.index(letter) for letter in "ab1"}
    for completion in seen["stop string"]:
        assert not stops.intersection(completion.tokens[:-1])
        if completion.tokens[-1] in stops:
            assert completion.finish_reason == "stop"
    assert any(completion.tokens[-1] in stops for completion in seen["stop string"])


def test_a_response_ends_with_its_stop_string_however_many_tokens_a_step_brings(seen):
    for stopped, whole in zip(seen["stop string, greedy"], seen["greedy"], strict=True):
        tokens = whole.tokens.tolist()
        three = [tokens[place : place + 3] == [50, 50, 50] for place in range(len(tokens) - 2)]
        assert stopped.tokens.tolist() == (tokens[: three.index(True) + 3] if any(three) else tokens)
        assert len(stopped.logprobs) == sum(count for _, count in stopped.versions) == len(stopped.tokens)
    assert any(len(stopped.tokens) == 3 for stopped in seen["stop string, greedy"])


def test_a_response_continues_from_its_tokens_as_if_it_had_not_ended(seen, model_folder):
    check_logprobs(load(model_folder).eval(), seen["prompts"], seen["continued"], temperature=0.8)
    pairs = list(zip(seen["continued"], seen["nothing stops"], strict=True))
    if "drafts" in seen:
        # The accepted drafts decide how many random numbers a response draws, so only the tokens so far are the same.
        heads = [
            (found.tokens[: 1 + number], whole.tokens[: 1 + number]) for number, (found, whole) in enumerate(pairs)
        ]
        assert all(np.array_equal(*head) for head in heads)
    else:
        assert all(np.array_equal(found.tokens, whole.tokens) for found, whole in pairs)
    assert all(found.versions == whole.versions and len(found.logprobs) == 20 for found, whole in pairs)


def test_a_stop_string_may_begin_in_the_tokens_so_far(seen):
    for found, whole in zip(seen["continued to a stop string"], seen["stop string, greedy"], strict=True):
        assert found.tokens.tolist() == whole.tokens.tolist() and found.finish_reason == whole.finish_reason


def test_tokens_of_accepted_and_of_rejected_drafts_are_drawn_from_the_models_distribution(seen, model_folder):
    """Of many second tokens, how many are the proposed one, and the mean of all others, are as the model says."""
    if "drafts" not in seen:
        pytest.skip("only one of the engines speculates")
    prompt, found = seen["second tokens"]
    firsts, seconds = torch.tensor([completion.tokens.tolist() for completion in found]).T
    with torch.no_grad():
        rows = torch.tensor([[*prompt, first] for first in range(64)])
        of_first = (load(model_folder).eval()(rows).logits[:, -1] / 0.8).softmax(-1)
    probabilities = of_first[firsts]
    drafted = torch.isin(firsts, torch.tensor(prompt))
    # The prompt counts upwards; after its last token comes the first sampled one.
    proposed = torch.where(firsts == prompt[-1], firsts, firsts + 1).clamp(max=63)
    hits, hit = (seconds == proposed)[drafted], probabilities.gather(1, proposed[:, None]).squeeze(1)[drafted]
    assert len(hits) > 500
    assert abs(hits.sum() - hit.sum()) < 3 * (hit * (1 - hit)).sum().sqrt()
    tokens = torch.arange(64.0)
    mean = probabilities @ tokens
    variance = probabilities @ tokens.square() - mean.square()
    assert abs((seconds - mean)[drafted].sum()) < 3 * variance[drafted].sum().sqrt()
    drafts = seen["drafts"]
    assert drafts.count == len(hits) and hits.sum() <= drafts.accepted < drafts.tokens
    assert drafts.metrics() == {
        "speculation_acceptance": drafts.accepted / drafts.tokens,
        "speculation_accepted_length": drafts.accepted / drafts.count,
        "speculation_paused": 0.0,
    }


def test_after_a_refit_the_engine_is_the_new_model(seen, new_model):
    assert seen["checksums"] == seen["sent"].checksums
    assert set(seen["seconds"]) == {"transfer", "load"}
    check_logprobs(new_model, seen["prompts"], seen["refitted"], temperature=1.0)


def test_a_broadcast_brings_the_old_model_back(seen):
    assert seen["broadcast checksums"] == seen["sent.broadcast"].checksums
    assert seen["back again"] == seen["sampled"]


def test_a_weight_that_the_producer_left_out_is_an_error(seen):
    assert "did not update 1 weights of the engine" in seen["partial"]
    assert LEFT_OUT in seen["partial"]


def test_an_engine_with_weights_of_two_policies_generates_nothing_until_the_next_refit(seen):
    assert "the last refit failed" in seen["after partial"]
    assert seen["whole again"] == seen["sampled"]


@pytest.mark.parametrize("caches", ["kept caches", "recomputed caches"])
def test_responses_continue_with_new_weights_and_name_those_of_each_token(seen, model_folder, new_model, caches):
    if caches not in seen:
        pytest.skip("a batch of the reference engine is generated as a whole")
    alone, *found = seen[caches]
    assert alone.versions == ((3, len(alone.tokens)),) and len(found) == 12
    models = {0: load(model_folder).eval(), 3: new_model}
    for index, completion in enumerate(found):
        (first, old), (second, new) = completion.versions
        assert (first, second) == (0, 3) and old + new == 16
        off = {}
        for version, model in models.items():
            own = scores(model, seen["prompts"][index // 4], completion, 1.0)
            off[version] = (own - torch.from_numpy(completion.logprobs)).abs().tolist()
        assert max(off[0][:old]) < 1e-4, "old weights sampled the tokens that name them"
        # A cache of the old weights makes the new ones see another past.
        assert (max(off[3][old:]) < 1e-4) == (caches == "recomputed caches")


def test_the_models_own_end_tokens_end_a_response_of_the_transformers_engine(model_folder, tmp_path):
    from nemo_rl_lite.generation.transformers import TransformersEngine

    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(64))}))
    config = compose_config(
        [f"policy.model_name={folder}", "policy.max_total_sequence_length=32", "generation=transformers"]
    )
    engine = TransformersEngine(config.generation, config.policy, str(folder), seed=0, on_gpu=False)
    sampling = Sampling(1.0, 1.0, None, 4, stop_token_ids=(2,), stop_strings=())

    def generate(sampling):
        engine.submit({0: Request((1, 5, 41), sampling, seed=1)})
        return engine.step()[0]

    ended = generate(sampling)
    assert ended.finish_reason == "stop" and len(ended.tokens) == 1
    # Nothing ends a probe.
    probe = generate(replace(sampling, stop_token_ids=()))
    assert probe.finish_reason == "length" and len(probe.tokens) == 4


OPTIONS = """
import sys
from vllm.config import CUDAGraphMode, StructuredOutputsConfig
from vllm.engine.arg_utils import EngineArgs

from nemo_rl_lite.generation.vllm.arguments import _configured

own = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]}}
outputs = {"backend": "xgrammar", "disable_any_whitespace": True}
options = _configured({"structured_outputs_config": outputs, "max_logprobs": 3, **own})
arguments = EngineArgs(model=sys.argv[1], **options)
assert isinstance(arguments.structured_outputs_config, StructuredOutputsConfig), arguments.structured_outputs_config
assert arguments.structured_outputs_config.disable_any_whitespace
assert arguments.max_logprobs == 3
assert arguments.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
assert arguments.compilation_config.cudagraph_capture_sizes == [1, 2]
"""


def test_options_that_are_dictionaries_become_vllms_own_objects(model_folder, engine_environment, tmp_path):
    """As `vllm.LLM` would make them."""
    (tmp_path / "options.py").write_text(OPTIONS)
    run_script(tmp_path / "options.py", [model_folder], engine_environment, tmp_path / "log")
