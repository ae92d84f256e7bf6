"""Python as a tool: code of the assistant runs in the sandbox, and it reads what the code printed."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_lite.data.problems import Message, Problem
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.tools import ToolEnvironment, called, shortened
from nemo_rl_lite.host.sandbox import Limits, run_python

_BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL)
_CODE = {"type": "string", "description": "The code. What it prints is the answer."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code. Each call starts afresh, without the variables of earlier ones.",
        "parameters": {"type": "object", "properties": {"code": _CODE}, "required": ["code"]},
    },
}


class Python(ToolEnvironment):
    """Offers the tool `python(code)`. With `call="block"` it offers none: the last fenced block of Python in a turn is
    the call, and the user's next message the answer, so that any model can use it."""

    def __init__(self, call: str, seconds: float, memory_mib: int, max_characters: int):
        """`seconds` of a call's time, `memory_mib` of its memory, and the characters of its output that are kept.

        Raises:
            ValueError: `call` is neither `tool` nor `block`, or a limit is not positive.
        """
        if call not in ("tool", "block"):
            raise ValueError(f"call must be tool or block, not {call!r}")
        if min(seconds, memory_mib, max_characters) <= 0:
            raise ValueError("seconds, memory_mib and max_characters must be positive")
        self.tools: Sequence[Tool] = [_TOOL] if call == "tool" else []
        # A character has up to four bytes.
        self._limits, self._most = Limits(seconds, memory_mib, output=4 * max_characters + 4), max_characters

    async def call(self, problem: Problem, name: str, arguments: Mapping[str, Any]) -> str:
        """Run the code of a call."""
        return await self._run(arguments["code"])

    async def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """See `Environment.step`."""
        blocks = () if self.tools else _BLOCK.findall(conversation[-1]["content"])
        if not blocks:
            return await super().step(problem, conversation)
        return Observation(({"role": "user", "content": await self._run(blocks[-1])},))

    async def _run(self, code: str) -> str:
        ran = await called(run_python, code, limits=self._limits)
        said = [shortened(ran.output.rstrip(), self._most)] if ran.output.strip() else []
        if ran.status is None:
            said.append(f"error: the code took longer than {self._limits.seconds:g} s")
        elif ran.status < 0:
            said.append(f"error: the code was ended by signal {-ran.status}")
        return "\n".join(said) or "[nothing was printed]"
