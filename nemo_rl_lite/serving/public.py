"""Answers requests outside of episodes, each with its own sampling."""

import asyncio
import random
from dataclasses import dataclass, replace
from functools import partial

from nemo_rl_lite.config.engines import Engine
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.generation.interface import Request, RequestError, Requests, Sampling
from nemo_rl_lite.serving.protocol import FULL, Answer, ApiRequest, ChoiceProgress, RefusedError, tokenized

_SEED_BITS = 31


@dataclass(frozen=True)
class ResponderConfig:
    """Default sampling of requests, and the limits of the engine. `max_length`: maximum number of tokens of a prompt
    and its response."""

    tokenizer: ChatTokenizer
    sampling: Sampling
    max_length: int
    engine: Engine


@dataclass(frozen=True)
class PublicHandler:
    """A stateless `CompletionHandler`."""

    config: ResponderConfig
    requests: Requests

    async def respond(self, asked: ApiRequest, progress: ChoiceProgress | None = None) -> Answer:
        usual, tokenizer, max_length = self._sampling(asked), self.config.tokenizer, self.config.max_length
        prompts = await tokenized(asked, lambda: asked.prompts(tokenizer), tokenizer, max_length)
        samplings = [self._limited(usual, asked, len(prompt)) for prompt in prompts]
        # On CPUs, vLLM ignores all seeds of a batch if one request has none.
        seed = random.getrandbits(_SEED_BITS) if asked.seed is None else asked.seed
        seeds = [(seed + index) % 2**_SEED_BITS for index in range(asked.n or 1)]
        streams, each = progress is not None, zip(prompts, samplings, strict=True)
        requests = [Request(*one, seed, streams=streams) for one in each for seed in seeds]
        samples = (
            self.requests.sample(one, progress=None if progress is None else partial(progress, index))
            for index, one in enumerate(requests)
        )
        try:
            sampled = await asyncio.gather(*samples)
        except RequestError as error:
            raise RefusedError(400, str(error), "response_format" if asked.response_format else None) from None
        completions = tuple(completion for completion, _ in sampled)
        return Answer(prompts, completions, tuple(asked.reply(one, tokenizer) for one in completions))

    def _limited(self, usual: Sampling, asked: ApiRequest, prompt_tokens: int) -> Sampling:
        """Limit new tokens to the room in the context. See `limited`."""
        room = self.config.max_length - prompt_tokens
        if room > 0:
            usual = replace(usual, max_new_tokens=min(usual.max_new_tokens, room))
        return limited(usual, asked, prompt_tokens, self.config.max_length)

    def _sampling(self, asked: ApiRequest) -> Sampling:
        usual, engine = self.config.sampling, self.config.engine
        sampling = replace(usual, stop_strings=(*usual.stop_strings, *(asked.stop or ())))
        temperature = sampling.temperature if asked.temperature is None else asked.temperature
        if found := out_of_range(engine, temperature, asked.top_p, asked.top_k):
            name, rule = found
            raise RefusedError(400, f"{name} = {rule}", name)
        options = asked.options()
        if not temperature and options.top_logprobs == 1:
            # The sampled token is the most likely one.
            options = replace(options, top_logprobs=0)
        if (unsupported := options.changed()) and not engine.takes_options:
            name = unsupported[0]
            raise RefusedError(400, f"{name} is not supported by this engine: serve with vLLM, or leave it out", name)
        sampling = replace(sampling, options=options)
        if not temperature:
            return sampling.greedy()
        top_k = sampling.top_k if asked.top_k is None else all_or(asked.top_k)
        min_p = sampling.min_p if asked.min_p is None else asked.min_p
        top_p = asked.top_p or sampling.top_p
        return replace(sampling, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)


def out_of_range(
    engine: Engine, temperature: float | None, top_p: float | None, top_k: int | None
) -> tuple[str, str] | None:
    """Return the name of a sampling parameter that the engine cannot take, and its value with the rule."""
    lowest, highest = engine.temperatures
    if temperature and not lowest <= temperature <= highest:
        return "temperature", f"{temperature:g}: must be 0, or {lowest:g} to {highest:g}, for this engine"
    if top_p is not None and not 0 < top_p <= 1:
        return "top_p", f"{top_p:g}: must be above 0 and at most 1"
    if top_k is not None and top_k < -1:
        return "top_k", f"{top_k}: must be -1 or more"
    return None


def all_or(top_k: int) -> int | None:
    """Return None for all tokens, which vLLM calls -1 and 0."""
    return top_k if top_k > 0 else None


def limited(sampling: Sampling, asked: ApiRequest, prompt_tokens: int, max_length: int) -> Sampling:
    """Set the limit on new tokens: the request's, or that of `sampling` if it is lower. Agents ask for the maximum of
    other models. Raises RefusedError: the context has no room."""
    most = min(sampling.max_new_tokens, asked.most_tokens or sampling.max_new_tokens)
    if prompt_tokens + most > max_length:
        fix = "shorten the prompt" if asked.most_tokens is None else "lower max_tokens, or shorten the prompt"
        raise RefusedError(
            400,
            f"{prompt_tokens} tokens of {asked.source} and {most} of the response exceed the context of {max_length} "
            f"(policy.max_total_sequence_length): {fix}",
            asked.source,
            FULL,
        )
    return replace(sampling, max_new_tokens=most)
