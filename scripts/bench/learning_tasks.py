"""Tasks of reasoning-gym that SmolLM2-135M-Instruct solves now and then, under the names that learning.py takes."""

import json
from dataclasses import dataclass, field
from typing import Any

NUMBER = "Answer with the number alone."
RESULT = "Answer with the result alone."


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym with the arguments that make it as easy as the model needs it."""

    task: str
    arguments: dict[str, Any]
    system_prompt: str | None = None
    reward: str = "last_number"
    max_new_tokens: int = 24
    max_length: int = 160
    held_out: float = 0.2
    """The share of distinct problems that is never trained on."""
    extra: tuple[str, ...] = field(default=())

    def overrides(self) -> list[str]:
        """The overrides of the train command that choose it."""
        arguments = ",".join(f"{name}:{_value(value)}" for name, value in self.arguments.items())
        prompt = [] if self.system_prompt is None else [f"data.system_prompt={json.dumps(self.system_prompt)}"]
        return [
            *("data=reasoning_gym", f"data.task={self.task}", f"data.task_kwargs={{{arguments}}}"),
            *(f"data.validation_fraction={self.held_out}", f"reward={self.reward}"),
            *(f"generation.max_new_tokens={self.max_new_tokens}", *prompt, *self.extra),
            f"policy.max_total_sequence_length={self.max_length}",
        ]


def _value(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_value, value))}]"
    return json.dumps(value)


TASKS = {
    "chain-sum-3": Task("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}, NUMBER),
    "chain-sum-2x2": Task("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, NUMBER),
    "letter-counting": Task("letter_counting", {"min_words": 2, "max_words": 4}, NUMBER),
    "gcd": Task("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 40}, NUMBER),
    "spell-backward": Task(
        "spell_backward", {"min_word_len": 3, "max_word_len": 4}, RESULT, "reasoning_gym", max_new_tokens=12
    ),
}
