"""Environments of verifiers, as their authors write them: a tool, and a game of several turns."""

import verifiers as vf


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Game(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == "break":
            raise vf.Error("the board is broken")
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"not {said}"}]


def right(completion, answer, **kwargs):
    said = [message.content for message in completion if message.role == "assistant"]
    return 1.0 if said and said[-1] == answer else 0.25


def load_environment(kind: str = "game"):
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "2+3?"}], "answer": "5", "example_id": 0}])
    rubric = vf.Rubric(funcs=[right])
    if kind == "tool":
        return vf.ToolEnv(tools=[add], dataset=rows, rubric=rubric, max_turns=5)
    return Game(dataset=rows, rubric=rubric, max_turns=5)
