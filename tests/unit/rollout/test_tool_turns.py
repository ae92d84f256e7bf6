"""Whole episodes with tools: the prompt offers them, calls are parsed from what was sampled, answers are written by the
chat template, and the tokens of the policy stay as they are."""

import json
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet
import pytest
from tokenizers import AddedToken

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.data.tools import callable_tools
from nemo_rl_lite.environments.registry import InThisProcess
from nemo_rl_lite.environments.tools import Functions, Python
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.models.embedded import build_tokenizer
from nemo_rl_lite.rewards.registry import find_reward
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutTask
from nemo_rl_lite.rollout.play import Turns
from nemo_rl_lite.rollout.store import RolloutFiles, rollout_files
from tests.unit.rollout.script import Script, collected_by, judged_by

LIMITS = {"call": "tool", "seconds": 20, "memory_mib": 512, "max_characters": 200}
FUNCTIONS = {"tools": ["tests.unit.environments.test_tools.add"], "max_characters": 100}
OFFERED = {
    "python": callable_tools(Python(**LIMITS).tools, "python"),
    "tools": callable_tools(Functions(**FUNCTIONS).tools, "tools"),
}
LETTERS = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ{}|$@^~`\\\n"]


def tokenizer_of(folder, template=None, end="<eos>") -> ChatTokenizer:
    """One token a letter, with a chat template of TRL's and its end token; by default the embedded model's own."""
    tokenizer = build_tokenizer()
    if template is not None:
        tokenizer.add_tokens(LETTERS)
        tokenizer.add_tokens([AddedToken(end, special=True)])
        tokenizer.eos_token = end
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return ChatTokenizer(folder)


class Tokens(Script):
    """A script whose texts are encoded by a real tokenizer, with its end token."""

    def __init__(self, tokenizer: ChatTokenizer, *turns: list[str]):
        super().__init__(*turns)
        self.tokenizer = tokenizer

    async def sample(self, request, conversation, progress=None):
        turn = next(place for place, left in enumerate(self.turns) if left) if conversation.tokens else 0
        self.asked[turn].append(request)
        tokens = (*self.tokenizer._tokens(self.turns[turn].pop(0)), self.tokenizer.end_tokens[0])
        found = Completion(tokens, (-0.5,) * len(tokens), "stop", (0,) * len(tokens))
        conversation.add_turn(request, found, 0)
        return found, 0


def collect(tokenizer, environment, *turns):
    name, kwargs = environment
    problem = Problem(chat("6*7?"), "42", tools=OFFERED[name])
    path = {"python": "nemo_rl_lite.environments.tools.Python", "tools": "nemo_rl_lite.environments.tools.Functions"}
    collector = collected_by(
        script := Tokens(tokenizer, *([turn] for turn in turns)),
        judged_by(find_reward("exact_match", {})),
        2000,
        ErrorShares(0.0, 0.0),
        Turns(InThisProcess(path[name], kwargs), 5),
        tokenizer,
    )
    sampling = Sampling(1.0, 1.0, None, 100, tokenizer.end_tokens, ())
    return collector.collect(RolloutTask([problem].__getitem__, 1, 1, sampling, 1)), script


def test_the_embedded_model_is_offered_python_and_uses_it(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    call = "<call=python><arg=code>print(6*7)</arg></call>"
    rollout, script = collect(tokenizer, ("python", LIMITS), call, "42")
    (episode,) = rollout.episodes
    assert tokenizer._tokenizer.decode(script.asked[0][0].prompt) == "<bos><tool=python(code)>6*7?="
    asked, answered, final = episode.said
    assert asked["content"] == call and asked["tool_calls"][0]["function"] == {
        "name": "python",
        "arguments": {"code": "print(6*7)"},
    }
    assert answered == {"role": "tool", "content": "42", "name": "python", "tool_call_id": "call01000"}
    assert final["content"] == "42" and "tool_calls" not in final and episode.reward == 1
    whole = tokenizer._tokenizer.decode(episode.tokens)
    assert whole == f"<bos><tool=python(code)>6*7?={call}<eos>42=42<eos>"
    mask = rollout.rows([0.0], 0)[0].mask
    assert sum(mask) == len(tokenizer._tokens(call)) + 1 + 3, "no token of a prompt or of an answer is trained on"
    RolloutFiles(tmp_path, None, 0).write(1, "train", rollout)
    (row,) = pyarrow.parquet.read_table(rollout_files(tmp_path)[0]).to_pylist()
    assert json.loads(row["tools"])[0]["function"]["name"] == "python"
    assert json.loads(row["turns"][0]["other"])["tool_calls"][0]["function"]["arguments"] == {"code": "print(6*7)"}


def test_calls_that_are_wrong_are_told_and_the_episode_goes_on(tmp_path):
    turns = [
        "<call=ad><arg=a>1</arg></call>",
        "<call=add><arg=a>one</arg></call><call=add><arg=a>1</call>",
        "<call=add><arg=a>40</arg></call><call=add><arg=a>40</arg><arg=b>2</arg></call>",
        "42",
    ]
    rollout, _ = collect(tokenizer_of(tmp_path), ("tools", FUNCTIONS), *turns)
    (episode,) = rollout.episodes
    assert [message["content"] for message in episode.said if message["role"] == "tool"] == [
        "error: there is no tool 'ad'; the tools are: add",
        "error: the argument a: 'one' is not of type 'integer'",
        "error: an argument is written as <arg=NAME>VALUE</arg>",
        "41",
        "42",
    ]
    assert (episode.reward, episode.ending, rollout.environment_errors) == (1, "stop", 0)


# Calls as the templates of Qwen, Llama and Qwen 3.5 have them.
HERMES = '<tool_call>\n{"name": "NAME", "arguments": {"a": 41}}\n</tool_call>'
LLAMA = '{"name": "NAME", "parameters": {"a": 41}}'
TAGS = "<tool_call>\n<function=NAME>\n<parameter=a>\n41\n</parameter>\n</function>\n</tool_call>"


def template(name: str) -> str:
    return (Path(find_spec("trl").origin).parent / "chat_templates" / name).read_text()


@pytest.mark.parametrize(
    ("name", "end", "call"),
    [
        ("qwen2_5.jinja", "<|im_end|>", HERMES),
        ("qwen3_instruct_2507.jinja", "<|im_end|>", HERMES),
        ("llama3_1.jinja", "<|eot_id|>", LLAMA),
        ("qwen3_5_nothink.jinja", "<|im_end|>", TAGS),
    ],
)
def test_prompt_calls_and_answers_are_the_templates_own_rendering(tmp_path, name, end, call):
    tokenizer = tokenizer_of(tmp_path, template(name), end)
    rollout, _ = collect(tokenizer, ("tools", FUNCTIONS), call.replace("NAME", "add"), "42")
    (episode,) = rollout.episodes
    assert [message["role"] for message in episode.said] == ["assistant", "tool", "assistant"]
    asked = {"role": "assistant", "content": "", "tool_calls": episode.said[0]["tool_calls"]}
    whole = tokenizer.prompt([*episode.problem.messages, asked, episode.said[1]], OFFERED["tools"])
    assert episode.tokens[: len(whole)] == whole and episode.reward == 1


def test_several_calls_of_a_turn_where_the_template_writes_one(tmp_path):
    """Llama 3's template refuses a turn with two calls; their answers can be written."""
    tokenizer = tokenizer_of(tmp_path, template("llama3_1.jinja"), "<|eot_id|>")
    answers = [{"role": "tool", "content": str(n), "name": "add", "tool_call_id": f"call0100{n}"} for n in (1, 2)]
    text = tokenizer._tokenizer.decode(tokenizer.between_turns(answers, tokenizer.end_tokens[0]))
    assert '"1"<|eot_id|>' in text and '"2"<|eot_id|>' in text and text.endswith("assistant<|end_header_id|>\n\n")


def test_what_a_model_thinks_is_no_call(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    call = "<call=add><arg=a>1</arg></call>"
    tokens = tokenizer._tokens(f"<think>{call}</think>so: {call}")
    assert len(tokenizer.tool_calls(tokens, OFFERED["tools"], 1)) == 1
    assert tokenizer.tool_calls(tokenizer._tokens("42"), OFFERED["tools"], 1) == []
