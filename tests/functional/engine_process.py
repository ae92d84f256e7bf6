"""An engine in a separate process, which samples, takes new weights, samples again and writes the results to a file."""

import importlib
import pickle
import sys
from dataclasses import replace
from pathlib import Path

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.refit.transport.report import RefitReport
from nemo_rl_lite.rules.compose import compose_config

backend, model_folder, source_file, output = sys.argv[1:]
overrides = [f"generation={backend}", f"policy.model_name={model_folder}", "generation.stop_strings=['zz']"]
config = compose_config(overrides)
module_name, _, class_name = ENGINES[backend].worker.rpartition(".")
engine_class = getattr(importlib.import_module(module_name), class_name)
engine = engine_class(config.generation, config.policy, model_folder, seed=0, on_gpu=False)

prompts = [[1, 5, 6, 7, 8, 41], [1, 9, 41], [1, 4, 4, 4, 4, 4, 4, 41]]
sampling = Sampling(0.8, 1.0, None, 8, stop_token_ids=(2,), stop_strings=(), samples_per_prompt=4, seed=11)
seen = {
    "prompts": prompts,
    "greedy": engine.generate(prompts, replace(sampling.greedy(), samples_per_prompt=1)),
    "sampled": engine.generate(prompts, sampling),
    "again": engine.generate(prompts, sampling),
    "other seed": engine.generate(prompts, replace(sampling, seed=12)),
    "stops": engine.generate(prompts, replace(sampling, stop_token_ids=tuple(range(2, 34)))),
    "nothing stops": engine.generate(prompts, replace(sampling, stop_token_ids=(), max_new_tokens=20)),
    "top k": engine.generate(prompts, replace(sampling, top_k=1, samples_per_prompt=1)),
    "stop string": engine.generate(prompts, replace(sampling, stop_strings=("a", "b", "1"), max_new_tokens=20)),
}


def refit(name: str) -> list[RefitReport]:
    """Take part in the refit whose source the test has written to `source_file` + name."""
    engine.join_refit([pickle.loads(Path(source_file + name).read_bytes())])
    return engine.receive_weights()


(report,) = refit("")
seen["checksums"] = report.checksums
seen["seconds"] = report.seconds
seen["refitted"] = engine.generate(prompts, replace(sampling, temperature=1.0))
(report,) = refit(".broadcast")
seen["broadcast checksums"] = report.checksums
seen["back again"] = engine.generate(prompts, sampling)
try:
    refit(".partial")
except RefitError as error:
    seen["partial"] = str(error)
try:
    engine.generate(prompts, sampling)
except RefitError as error:
    seen["after partial"] = str(error)
refit(".whole")
seen["whole again"] = engine.generate(prompts, sampling)
Path(output).write_bytes(pickle.dumps(seen))
