"""The reference engine over transformers' `generate`: slow and simple."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.config.schema import GenerationConfig, PolicyConfig
from nemo_rl_lite.data.tokenizer import load_tokenizer
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.interface import (
    Completion,
    Decoded,
    EngineLoad,
    Request,
    RequestError,
    Sampling,
    Unfinished,
)
from nemo_rl_lite.refit.engine import CopyReplayLoader, Source, WeightsState, connect
from nemo_rl_lite.refit.interface import Receiver, RefitReport
from nemo_rl_lite.refit.layout import Named
from nemo_rl_lite.refit.trace import Recipe
from nemo_rl_lite.refit.windows import Needed, Piece, WindowReceiver, WindowRoutes, needed_pieces


class TransformersEngine:
    """An `Engine` over a Hugging Face model, with exact logprobs and refits by name."""

    _receiver: Receiver
    _needed: Needed | None

    def __init__(
        self,
        generation: GenerationConfig,
        policy: PolicyConfig,
        model_path: str,
        seed: int,
        on_gpu: bool,
    ):
        from transformers import AutoModelForCausalLM
        from transformers import GenerationConfig as Defaults

        torch.manual_seed(seed)
        self._weights = WeightsState(complete=True)
        self._device = torch.device("cuda" if on_gpu else "cpu")
        loaded: Any = AutoModelForCausalLM.from_pretrained(Path(model_path), dtype=getattr(torch, policy.precision))
        self._model = loaded.to(self._device).eval()
        # Keep only the end tokens: other defaults, such as a repetition penalty, change the distribution.
        ends = self._model.generation_config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())
        self._model.generation_config = Defaults()
        self._tokenizer = load_tokenizer(Path(model_path))
        self.max_length = policy.max_total_sequence_length
        self._batch_size = generation.vllm_cfg.max_num_seqs
        self._requests: dict[int, Request] = {}
        self._decoded = Decoded()
        self.version = 0

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Add requests. Raises RefitError: a refit has failed halfway."""
        self._weights.require()
        self._requests |= requests

    def step(self) -> dict[int, Completion | RequestError]:
        """Generate a batch to its end."""
        if not self._requests:
            return {}
        sampling = next(iter(self._requests.values())).sampling
        alike = [number for number, request in self._requests.items() if request.sampling == sampling]
        batch = {number: self._requests.pop(number) for number in alike[: self._batch_size]}
        completions = self._generate(list(batch.values()), sampling)
        self._decoded += _decoded(list(batch.values()), completions)
        return dict(zip(batch, completions, strict=True))

    def new_tokens(self, of_all: bool) -> dict[int, Unfinished]:
        """Return nothing: between two steps, no request has begun."""
        return {}

    def load(self) -> EngineLoad:
        """Return no load: a batch is generated to its end, and its cache is freed."""
        return EngineLoad()

    def abort(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._requests.pop(number, None)

    def sample_now(self, request: Request) -> Completion:
        self._weights.require()
        (completion,) = self._generate([request], request.sampling)
        return completion

    def take_decoded(self) -> Decoded:
        taken, self._decoded = self._decoded, Decoded()
        return taken

    def memory(self) -> dict[str, int]:
        return {}

    def sleep(self) -> None:
        """Do nothing: the engine keeps its weights and has no cache between calls."""

    def wake_weights(self) -> None:
        """Do nothing: the engine was never asleep."""

    def wake_cache(self) -> None:
        """Do nothing: the engine was never asleep."""

    def join_refit(self, sources: Sequence[Source]) -> None:
        # Free the buckets of an earlier connection, which its loader refers to.
        for earlier in ("_receiver", "_loader"):
            vars(self).pop(earlier, None)
        self._receiver = connect(sources[0], self._device)
        self._loader = CopyReplayLoader(self._load, [*self._model.parameters(), *self._model.buffers()])

    def needed_pieces(self, recipe: Recipe) -> list[Sequence[Piece] | None]:
        self._needed = needed_pieces(self._loader, recipe)
        return [None if self._needed is None else [piece for piece, _ in self._needed]]

    def join_windows(self, routes: Sequence[WindowRoutes]) -> list[str | None]:
        # Free the buckets of the first refit.
        self._loader.forget_buffers()
        del self._receiver
        self._receiver = receiver = WindowReceiver(routes[0], self._needed or (), self._device)
        return [receiver.first_differing()]

    @torch.no_grad()
    def receive_weights(self, version: int) -> list[RefitReport]:
        started, loader, self.version = time.perf_counter(), self._loader, version
        with self._weights.replacing():
            report = self._receiver.receive(loader)
            stale = [name for name, _ in self._model.named_parameters() if name not in (loader.filled or ())]
            if stale:
                raise RefitError(f"the refit did not update {len(stale)} weights of the engine, such as {stale[0]}")
        report.seconds["load"] = time.perf_counter() - started - report.seconds["transfer"]
        return [report]

    def _load(self, named: Sequence[Named]) -> set[str]:
        """Copy tensors to the weights by name; return the names of changed parameters, aliases included."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        own, received = parameters | dict(self._model.named_buffers()), set()
        for name, weight in named:
            if name not in own:
                raise RefitError(f"the transformers model has no weight named {name}")
            own[name].copy_(weight)
            received.add(own[name].data_ptr())
        return {name for name, parameter in parameters.items() if parameter.data_ptr() in received}

    @torch.no_grad()
    def _generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        width = max(len(request.prompt) for request in requests)
        # A padding token that was added to the tokenizer may have no row in the model.
        padding = self._tokenizer.pad_token_id or 0
        padding = padding if padding < self._model.get_input_embeddings().num_embeddings else 0
        # A probe has no stop tokens, so nothing ends it.
        stops = {*sampling.stop_token_ids, *self._ends} if sampling.stop_token_ids else set[int]()
        tokens = torch.tensor([[padding] * (width - len(one.prompt)) + list(one.prompt) for one in requests])
        present = torch.tensor([[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in requests])
        seeded = _SeededSampling(sampling, [request.seed for request in requests], self._device)
        strings = {"stop_strings": list(sampling.stop_strings), "tokenizer": self._tokenizer}
        output = self._model.generate(
            tokens.to(self._device),
            attention_mask=present.to(self._device),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(stops),
            pad_token_id=padding,
            # The maximum of the seeded scores is a sample.
            do_sample=False,
            logits_processor=[seeded],
            **(strings if sampling.stop_strings else {}),
        )
        chosen = torch.stack(seeded.logprobs, dim=1).tolist()
        return [
            self._completion(*row, stops, sampling.stop_strings)
            for row in zip(output[:, width:].tolist(), chosen, strict=True)
        ]

    def _completion(
        self, tokens: list[int], logprobs: list[float], stops: set[int], strings: Sequence[str]
    ) -> Completion:
        """Truncate a row of the batch after its first stop token or stop string."""
        length, reason = len(tokens), "length"
        for end in range(1, len(tokens) + 1):
            text = self._tokenizer.decode(tokens[:end]) if strings else ""
            if tokens[end - 1] in stops or any(stop in text for stop in strings):
                length, reason = end, "stop"
                break
        sampled = np.array(tokens[:length], np.int32), np.array(logprobs[:length], np.float32)
        return Completion(*sampled, reason, ((self.version, length),))


def _decoded(requests: Sequence[Request], completions: Sequence[Completion]) -> Decoded:
    """Count the work of sampling these responses in one batch."""
    later = [(len(one.prompt), len(own.tokens) - 1) for one, own in zip(requests, completions, strict=True)]
    cached = sum(tokens * prompt + tokens * (tokens + 1) // 2 for prompt, tokens in later)
    return Decoded(max(len(own.tokens) for own in completions), cached)


class _SeededSampling:
    """A logits processor with a random generator per row, which transformers lacks. The argmax of logprobs plus Gumbel
    noise is a sample (the Gumbel-max trick)."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int], device: torch.device):
        from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        self.logprobs: list[Tensor] = []
        """Logprobs of the sampled tokens, [rows], one tensor per step."""
        self._device = device
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds] if sampling.temperature else []
        self._warpers: list[Any] = [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature else []
        # In vLLM's order.
        self._warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
        self._warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        self._warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []

    def __call__(self, tokens_BT: Tensor, logits_BV: Tensor) -> Tensor:
        scores_BV = logits_BV.float()
        for warper in self._warpers:
            scores_BV = warper(tokens_BT, scores_BV)
        logprobs_BV = seeded_BV = scores_BV.log_softmax(-1)
        if self._generators:
            exponential = torch.empty(logprobs_BV.shape[1], device=self._device).exponential_
            # The negative logarithm of an exponential variable is Gumbel noise.
            noise = torch.stack([exponential(generator=one).clamp_min(1e-38).log() for one in self._generators])
            seeded_BV = logprobs_BV - noise
        self.logprobs.append(logprobs_BV.gather(-1, seeded_BV.argmax(-1, keepdim=True)).squeeze(-1))
        return seeded_BV
