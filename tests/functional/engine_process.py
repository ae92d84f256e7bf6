"""An engine in a separate process, which samples, takes new weights, samples again and writes the results to a file."""

import importlib
import pickle
import sys
from dataclasses import replace
from pathlib import Path

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.interface import Completion, Request, Sampling, ServedOptions, Unfinished
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.validation.compose import compose_config

backend, model_folder, source_file, output, *options = sys.argv[1:]
overrides = [
    f"generation={backend}",
    f"policy.model_name={model_folder}",
    "policy.max_total_sequence_length=32",
    "generation.stop_strings=['zz']",
    *options,
]
config = compose_config(overrides)
module_name, _, class_name = ENGINES[backend].worker.rpartition(".")
engine_class = getattr(importlib.import_module(module_name), class_name)
engine = engine_class(config.generation, config.policy, model_folder, seed=0, on_gpu=False)

prompts = [[1, 5, 6, 7, 8, 41], [1, 9, 41], [1, 4, 4, 4, 4, 4, 4, 41]]
sampling = Sampling(0.8, 1.0, None, 8, stop_token_ids=(2,), stop_strings=())


def requests(sampling: Sampling, samples: int = 4, seed: int = 11) -> dict[int, Request]:
    """`samples` requests for each prompt, each with a seed of its own."""
    asked = [Request(tuple(prompt), sampling, 0) for prompt in prompts for _ in range(samples)]
    return {number: replace(one, seed=seed * 1000 + number) for number, one in enumerate(asked)}


def generate(sampling: Sampling, samples: int = 4, seed: int = 11) -> list[Completion]:
    """The responses to all requests, submitted together."""
    return [done for _, done in sorted(finished(requests(sampling, samples, seed)).items())]


def finished(asked: dict[int, Request]) -> dict[int, Completion]:
    engine.submit(asked)
    found: dict[int, Completion] = {}
    while len(found) < len(asked):
        found |= engine.step()
    return found


def second_tokens() -> tuple[list[int], list[Completion]]:
    """Two tokens each after a prompt of many tokens: where the first is one of them, speculation proposes its next."""
    prompt = tuple(range(4, 26))
    two = replace(sampling, stop_token_ids=(), max_new_tokens=2)
    asked = {number: Request(prompt, two, seed=number) for number in range(3000)}
    return list(prompt), list(finished(asked).values())


def aborted() -> tuple[list[int], list[Completion]]:
    """What comes back where every other request is taken back before it has begun; and that the others are whole."""
    asked = requests(sampling)
    engine.submit(asked)
    engine.abort(list(range(0, len(asked), 2)))
    found: dict[int, Completion] = {}
    while len(found) < len(asked) // 2:
        found |= engine.step()
    return sorted(found | engine.step()), [done for _, done in sorted(found.items())]


# With drafts, vLLM has no min-p.
MIN_P = 0.0 if options else 0.2
seen = {
    "prompts": prompts,
    "smallest share": MIN_P,
    "greedy": generate(sampling.greedy(), samples=1),
    "decoded before": engine.take_decoded(),
    "sampled": generate(sampling),
    "probe": engine.sample_now(Request(tuple(prompts[0]), sampling, seed=3)),
    "decoded": engine.take_decoded(),
    "again": generate(sampling),
    "other seed": generate(sampling, seed=12),
    "backwards": finished(dict(reversed(requests(sampling).items()))),
    "aborted": aborted(),
    "stops": generate(replace(sampling, stop_token_ids=tuple(range(2, 34)))),
    "nothing stops": generate(replace(sampling, stop_token_ids=(), max_new_tokens=20)),
    "top k": generate(replace(sampling, top_k=1), samples=1),
    "truncated": generate(replace(sampling, min_p=MIN_P, top_k=5, top_p=0.9)),
    "min p": generate(replace(sampling, min_p=MIN_P)),
    "stop string, greedy": generate(replace(sampling, stop_strings=(":::",)).greedy(), samples=1),
    "stop string": generate(replace(sampling, stop_strings=("a", "b", "1"), max_new_tokens=20)),
}
if ENGINES[backend].takes_options:
    served = [ServedOptions(top_logprobs=3), ServedOptions(presence_penalty=1.0), ServedOptions(top_logprobs=99)]
    seen["options"] = [generate(replace(sampling.greedy(), options=one), samples=1) for one in served]


def continued(whole: list[Completion], sampling: Sampling, samples: int = 4) -> list[Completion]:
    """These responses, each sampled again from its first tokens on."""
    asked = requests(sampling, samples)
    for number, one in enumerate(whole):
        count = min(1 + number, len(one.tokens) - 1)
        begun = Unfinished(one.tokens[:count], one.logprobs[:count], "length", ((0, count),))
        asked[number] = replace(asked[number], begun=begun if count else None)
    return [done for _, done in sorted(finished(asked).items())]


seen["continued"] = continued(seen["nothing stops"], replace(sampling, stop_token_ids=(), max_new_tokens=20))
own = replace(sampling, stop_strings=(":::",)).greedy()
seen["continued to a stop string"] = continued(seen["stop string, greedy"], own, samples=1)


def refit(name: str, version: int) -> list[RefitReport]:
    """Take part in the refit whose source the test has written to `source_file` + name."""
    engine.join_refit([pickle.loads(Path(source_file + name).read_bytes())])
    return engine.receive_weights(version)


(report,) = refit("", 3)
seen["checksums"] = report.checksums
seen["seconds"] = report.seconds
seen["refitted"] = generate(replace(sampling, temperature=1.0))
(report,) = refit(".broadcast", 0)
seen["broadcast checksums"] = report.checksums
seen["back again"] = generate(sampling)
try:
    refit(".partial", 0)
except RefitError as error:
    seen["partial"] = str(error)
try:
    generate(sampling)
except RefitError as error:
    seen["after partial"] = str(error)
refit(".whole", 0)
seen["whole again"] = generate(sampling)


def midway(name: str, recomputes: bool) -> list[Completion]:
    """Responses that begin with the weights of version 0 and end with those of version 3."""
    engine._recomputes = recomputes
    asked = requests(replace(sampling, temperature=1.0, stop_token_ids=(), max_new_tokens=16))
    engine.submit(asked)
    for _ in range(5):
        engine._step()
    refit(name, 3)
    # What is sampled for somebody else changes nothing.
    alone = engine.sample_now(replace(asked[0], seed=5))
    found: dict[int, Completion] = {}
    while len(found) < len(asked):
        found |= engine.step()
    return [alone, *(done for _, done in sorted(found.items()))]


if backend == "vllm":
    seen["kept caches"] = midway(".midway", recomputes=False)
    refit(".old", 0)
    seen["recomputed caches"] = midway(".midway again", recomputes=True)
if options:
    engine.take_decoded()
    refit(".speculating", 0)
    seen["second tokens"] = second_tokens()
    seen["drafts"] = engine.take_decoded().drafts
Path(output).write_bytes(pickle.dumps(seen))
