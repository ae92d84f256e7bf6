"""Judge the responses of answers.tsv with reward=math and with math-verify alone.

The table has responses, reference answers, and whether the response is right. docs/math_reward.md lists the forms.
math-verify alone gets the reference between dollars and the response as it is.
"""

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import math_verify
import record

from nemo_rl_lite.rewards.mathematics import same_value

TABLE = Path(__file__).with_suffix(".tsv")


class Pair(NamedTuple):
    """A response, its reference answer, and the right verdict: 1, 0 or error."""

    right: str
    answer: str
    response: str


def main(arguments: list[str]) -> None:
    """Print what is judged wrongly, and write the record."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    pairs, results, ours = read_pairs(), [], list[Pair]()
    for name, reward in (("reward=math", same_value), (f"math-verify {version('math-verify')}", plain_math_verify)):
        wrong = wrongly_judged(pairs, reward)
        ours = ours or wrong if reward is same_value else ours
        found = {
            "pairs": len(pairs),
            "right answers": sum(one.right == "1" for one in pairs),
            "right answers paid": sum(one.right == "1" for one in pairs) - sum(one.right == "1" for one in wrong),
            "wrong answers paid": sum(one.right == "0" for one in wrong),
            "wrong verdicts": len(wrong),
        }
        results += [record.result(quantity, name, "", [count]) for quantity, count in found.items()]
    print(*ours, sep="\n")
    bars = [
        record.bar("pairs", len(pairs), 300, at_least=True),
        record.bar("wrong verdicts", len(ours), 0, at_least=False),
    ]
    print(
        record.write("answers", results, bars, more={"wrongly_judged": [one._asdict() for one in ours]}, machine=False)
    )


def read_pairs() -> list[Pair]:
    """Return the rows of the table."""
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("# ")]
    return [Pair(*line.replace("⏎", "\n").split("\t")) for line in lines]


def wrongly_judged(pairs: list[Pair], reward: Callable[[str, str], float]) -> list[Pair]:
    """Return the pairs of which the reward is not the right one."""
    return [pair for pair in pairs if _verdict(reward, pair) != pair.right]


def _verdict(reward: Callable[[str, str], float], pair: Pair) -> str:
    try:
        return str(int(reward(pair.response, pair.answer)))
    except ValueError:
        return "error"


def plain_math_verify(response: str, answer: str) -> float:
    """Return math-verify's verdict, with its defaults."""
    reference = math_verify.parse(f"${answer}$", parsing_timeout=0)
    return float(math_verify.verify(reference, math_verify.parse(response, parsing_timeout=0), timeout_seconds=0))


def trial() -> None:
    """Judge a few pairs."""
    few = read_pairs()[::20]
    with patch.object(sys.modules[__name__], "read_pairs", lambda: few):
        main([])


if __name__ == "__main__":
    record.start(main, trial)
