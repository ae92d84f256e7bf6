"""The part of verifiers 0.2.1 that the adapter and its tests use, with the same names and the same order of calls:
`Environment.run_rollout` asks a client for each turn, and the rubric judges at the end."""

import importlib
import inspect
import json

from verifiers.errors import Error, OverlongPromptError
from verifiers.types import AssistantMessage, Tool, ToolMessage, UserMessage

_KINDS = {"user": UserMessage, "tool": ToolMessage, "assistant": AssistantMessage}


def load_environment(env_id, **arguments):
    return importlib.import_module(env_id.replace("-", "_").split("/")[-1]).load_environment(**arguments)


class Rubric:
    def __init__(self, funcs):
        self.funcs = funcs

    async def score_rollout(self, state):
        given = {"completion": state["completion"], "answer": state["answer"], "state": state}
        state["reward"] = float(sum(function(**given) for function in self.funcs))


class MultiTurnEnv:
    def __init__(self, dataset, rubric, max_turns=-1, tool_defs=None):
        self.dataset, self.rubric, self.max_turns, self.tool_defs = dataset, rubric, max_turns, tool_defs

    def get_dataset(self):
        return self.dataset

    async def is_over(self, state):
        turns = len(state["trajectory"])
        stops = (state["error"], state["prompt_too_long"], state["final_env_response"], turns >= self.max_turns > 0)
        return any(stops)

    async def run_rollout(self, input, client, model, sampling_args):
        prompt = [_message(one) for one in input["prompt"]]
        state = {**input, "prompt": prompt, "trajectory": [], "error": None, "final_env_response": None}
        state["prompt_too_long"], chat = False, prompt
        while not await self.is_over(state):
            try:
                if state["trajectory"]:
                    new = await self.env_response(chat, state)
                    chat = [*chat, *(_message(one) for one in new)]
                    if state["final_env_response"] is not None:
                        continue
                response = await client.get_response(
                    prompt=chat, model=model, tools=self.tool_defs, sampling_args=sampling_args, state=state
                )
                said = AssistantMessage(content=response.message.content, tool_calls=response.message.tool_calls)
                state["trajectory"].append(said)
                chat = [*chat, said]
            except OverlongPromptError:
                state["prompt_too_long"] = True
            except Error as error:
                state["error"] = error
        state["completion"] = chat[len(prompt) :]
        await self.rubric.score_rollout(state)
        return {"reward": state["reward"], "error": repr(state["error"]) if state["error"] else None}


class ToolEnv(MultiTurnEnv):
    def __init__(self, tools, **others):
        self.tools = {tool.__name__: tool for tool in tools}
        schema = {"type": "integer"}
        definitions = [
            Tool(
                name=tool.__name__,
                description=tool.__doc__,
                parameters={"type": "object", "properties": dict.fromkeys(inspect.signature(tool).parameters, schema)},
            )
            for tool in tools
        ]
        super().__init__(tool_defs=definitions, **others)

    async def is_over(self, state):
        is_final = bool(state["trajectory"]) and not state["trajectory"][-1].tool_calls
        return is_final or await super().is_over(state)

    async def env_response(self, messages, state, **kwargs):
        answers = []
        for call in messages[-1].tool_calls:
            try:
                content = str(self.tools[call.name](**json.loads(call.arguments)))
            except Exception as error:
                content = f"{error}"
            answers.append(ToolMessage(role="tool", content=content, tool_call_id=call.id))
        return answers


def _message(value):
    return _KINDS[value["role"]](**value) if isinstance(value, dict) else value
