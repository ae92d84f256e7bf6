"""The reference engine: transformers' own generate(). Slow and simple; what vLLM is compared with, and its stand-in."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.config.schema import GenerationConfig, PolicyConfig
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.refit.engine.connection import Source, WeightsState, connect
from nemo_rl_lite.refit.engine.destinations import EngineLoader
from nemo_rl_lite.refit.layout.packing import Named
from nemo_rl_lite.refit.transport.report import RefitReport


class TransformersEngine:
    """A Hugging Face model that samples with exact logprobs and takes new weights by name."""

    def __init__(
        self,
        generation: GenerationConfig,
        policy: PolicyConfig,
        model_path: str,
        seed: int,
        on_gpu: bool,
    ):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers import GenerationConfig as Defaults

        torch.manual_seed(seed)
        self._weights = WeightsState(complete=True)
        self._device = torch.device("cuda" if on_gpu else "cpu")
        loaded: Any = AutoModelForCausalLM.from_pretrained(Path(model_path), dtype=getattr(torch, policy.precision))
        self._model = loaded.to(self._device).eval()
        # The model's own defaults (a repetition penalty, suppressed tokens) would change the distribution. Only its end
        # tokens are kept.
        ends = self._model.generation_config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())
        self._model.generation_config = Defaults()
        tokenizer: Any = AutoTokenizer.from_pretrained(Path(model_path))
        self._tokenizer = tokenizer
        self._batch_size = generation.vllm_cfg.max_num_seqs

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        self._weights.require()
        torch.manual_seed(sampling.seed)
        rows = [prompt for prompt in prompts for _ in range(sampling.samples_per_prompt)]
        completions = []
        for start in range(0, len(rows), self._batch_size):
            completions += self._generate(rows[start : start + self._batch_size], sampling)
        return completions

    def memory(self) -> dict[str, int]:
        return {}

    def sleep(self) -> None:
        """Do nothing: the reference engine keeps its weights and has no cache between calls."""

    def wake_weights(self) -> None:
        """Do nothing: the engine was never asleep."""

    def wake_cache(self) -> None:
        """Do nothing: the engine was never asleep."""

    def join_refit(self, sources: Sequence[Source]) -> None:
        self._receiver = connect(sources[0], self._device)

    @torch.no_grad()
    def receive_weights(self) -> list[RefitReport]:
        started, loader = time.perf_counter(), EngineLoader(self._load)
        with self._weights.replacing():
            report = self._receiver.receive(loader)
            stale = [name for name, _ in self._model.named_parameters() if name not in (loader.filled or ())]
            if stale:
                raise RefitError(f"the refit left {len(stale)} weights of the engine as they were, such as {stale[0]}")
        report.seconds["load"] = time.perf_counter() - started - report.seconds["transfer"]
        return [report]

    def _load(self, named: Sequence[Named]) -> set[str]:
        """Copy tensors to the weights of their names; returns the names of all parameters that have changed, also of
        those that share memory with a parameter of another name."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        own, received = parameters | dict(self._model.named_buffers()), set()
        for name, weight in named:
            if name not in own:
                raise RefitError(f"the transformers model has no weight named {name}")
            own[name].copy_(weight)
            received.add(own[name].data_ptr())
        return {name for name, parameter in parameters.items() if parameter.data_ptr() in received}

    @torch.no_grad()
    def _generate(self, rows: list[list[int]], sampling: Sampling) -> list[Completion]:
        width = max(len(row) for row in rows)
        padding = self._tokenizer.pad_token_id or 0
        tokens = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
        present = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        tokens, present = tokens.to(self._device), present.to(self._device)
        random = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
        }
        output = self._model.generate(
            tokens,
            attention_mask=present,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(self._stops(sampling)),
            pad_token_id=padding,
            return_dict_in_generate=True,
            output_scores=True,
            **(random if sampling.temperature > 0 else {"do_sample": False}),
            **(
                {"stop_strings": list(sampling.stop_strings), "tokenizer": self._tokenizer}
                if sampling.stop_strings
                else {}
            ),
        )
        responses = output.sequences[:, width:]
        # Scores are logits after temperature, top-p and top-k: the distribution that was sampled from.
        logprobs = torch.stack(output.scores, dim=1).float().log_softmax(-1)
        chosen = logprobs.gather(-1, responses[..., None]).squeeze(-1)
        return [self._completion(*row, sampling) for row in zip(responses.cpu(), chosen.cpu(), strict=True)]

    def _completion(self, response: Tensor, logprobs: Tensor, sampling: Sampling) -> Completion:
        tokens, stops = response.tolist(), self._stops(sampling)
        for length in range(1, len(tokens) + 1):
            ended = tokens[length - 1] in stops or self._has_stop_string(tokens[:length], sampling)
            if ended:
                return Completion(tuple(tokens[:length]), tuple(logprobs[:length].tolist()), "stop")
        return Completion(tuple(tokens), tuple(logprobs.tolist()), "length")

    def _stops(self, sampling: Sampling) -> set[int]:
        """The tokens that end a response; none where nothing ends it, as in a probe."""
        return {*sampling.stop_token_ids, *self._ends} if sampling.stop_token_ids else set()

    def _has_stop_string(self, tokens: list[int], sampling: Sampling) -> bool:
        if not sampling.stop_strings:
            return False
        text = self._tokenizer.decode(tokens)
        return any(stop in text for stop in sampling.stop_strings)
