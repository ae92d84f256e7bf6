"""Tasks of reasoning-gym for learning.py: so easy that SmolLM2-135M-Instruct solves some problems before training."""

import json
from dataclasses import dataclass
from typing import Any

NUMBER = "Answer with the number alone."
RESULT = "Answer with the result alone."


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym with arguments that make it easy, and how its responses are judged."""

    task: str
    arguments: dict[str, Any]
    system_prompt: str = NUMBER
    reward: str = "last_number"
    max_new_tokens: int = 24
    max_length: int = 160
    """Of prompt and response together, in tokens."""
    held_out: float = 0.2
    """The share of distinct problems that is never trained on."""

    def overrides(self) -> list[str]:
        """The overrides of the train command that choose it."""
        arguments = ",".join(f"{name}:{json.dumps(value)}" for name, value in self.arguments.items())
        return [
            *("data=reasoning_gym", f"data.task={self.task}", f"data.task_kwargs={{{arguments}}}"),
            *(f"data.validation_fraction={self.held_out}", f"data.system_prompt={json.dumps(self.system_prompt)}"),
            *(f"reward={self.reward}", f"generation.max_new_tokens={self.max_new_tokens}"),
            f"policy.max_total_sequence_length={self.max_length}",
        ]


def _number(task: str, **arguments: Any) -> Task:
    """A task whose answer is a number: the last one in the response counts."""
    return Task(task, arguments)


def _text(task: str, max_new_tokens: int, max_length: int, **arguments: Any) -> Task:
    """A task that judges the whole response itself."""
    return Task(task, arguments, RESULT, "reasoning_gym", max_new_tokens, max_length)


_DIGIT = {"min_digits": 1, "max_digits": 1}
_TWO = {"min_terms": 2, "max_terms": 2}
_TENTHS = {"min_decimal_places": 1, "max_decimal_places": 1}
_WHOLE = {"min_decimals": 0, "max_decimals": 0}

TASKS = {
    "chain-sum-3": _number("chain_sum", min_terms=3, max_terms=3, **_DIGIT),
    "chain-sum-4": _number("chain_sum", min_terms=4, max_terms=4, **_DIGIT),
    "chain-sum-2-digits": _number("chain_sum", min_digits=2, max_digits=2, **_TWO),
    "basic-arithmetic": _number("basic_arithmetic", min_terms=2, max_terms=3, **_DIGIT),
    "products": _number("products", min_digits=1, max_digits=2, **_TWO),
    "decimal-sum": _number("decimal_chain_sum", **_TWO, **_DIGIT, **_TENTHS),
    "gcd": _number("gcd", min_numbers=2, max_numbers=2, min_value=1, max_value=60),
    "lcm": _number("lcm", min_numbers=2, max_numbers=2, min_value=1, max_value=30),
    "letter-counting": _number("letter_counting", min_words=2, max_words=4),
    "count-bits": _number("count_bits", min_n=1, max_n=2000),
    "leg-counting": _number("leg_counting", min_animals=1, max_animals=2, max_instances=4),
    "simple-equations": _number("simple_equations", min_terms=2, max_terms=3, min_value=1, max_value=20),
    "spell-backward": _text("spell_backward", 16, 160, min_word_len=3, max_word_len=5),
    "number-sorting": _text(
        "number_sorting", 40, 288, min_numbers=3, max_numbers=4, min_value=0, max_value=50, **_WHOLE
    ),
    "word-sorting": _text("word_sorting", 24, 288, min_words=2, max_words=2, min_word_length=3, max_word_length=6),
    "letter-jumble": _text("letter_jumble", 16, 200, min_word_len=3, max_word_len=4, min_words=1, max_words=2),
    "base-conversion": _text("base_conversion", 16, 200, min_base=2, max_base=8, min_value=1, max_value=200),
    "fractions": _text("fraction_simplification", 16, 160, min_value=1, max_value=12, min_factor=2, max_factor=8),
}
