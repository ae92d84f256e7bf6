"""Rules about rewards, environments and agents: by name, or a user's own by dotted path or file."""

import ast
import importlib.util
from collections.abc import Iterator

from nemo_rl_lite.config.algorithms import has_teacher
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig, RolloutAlgorithmConfig
from nemo_rl_lite.data.sources import ROWS
from nemo_rl_lite.environments.registry import ENVIRONMENTS
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rewards.judge import Term, terms_of
from nemo_rl_lite.rewards.registry import INSTANT, NONE, REWARDS
from nemo_rl_lite.rules import code
from nemo_rl_lite.rules.base import rule

# Packages that a reward needs in addition to this one.
_PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym", "judge": "openai"}

# These rewards compare a response with the answer of its row.
_COMPARING = ("exact_match", "last_number", "math")
# What these environments say is of use to a later turn alone.
_ANSWERING = ("calculator", "tools", "python")
# What these environments cannot be made without, and an example.
_NEEDED = {
    "tools": ("tools", "'environment.kwargs.tools=[my_package.search.search]'"),
    "nemo_gym": ("url", "environment.kwargs.url=http://localhost:8000"),
    "verifiers": ("environment", "environment.kwargs.environment=NAME"),
}

# What others call the first parameter of a reward that takes the answer first, and the second.
_ANSWERS = frozenset({"answer", "gold", "golden", "reference", "ground_truth", "truth", "target", "label", "expected"})
_RESPONSES = frozenset({"response", "completion", "prediction", "predicted", "pred", "generated", "hypothesis"})
_OF_TRL, _OF_VERL = {"prompts", "completions"}, {"data_source", "solution_str", "ground_truth"}


@rule("reward", options=RolloutAlgorithmConfig)
def rewards_exist(config: Config) -> Iterator[Violation]:
    terms = terms_of(config.reward)
    for term in terms:
        yield from _exists(term)
        if term.weight == 0:
            yield Violation(f"{term.section}.weight", 0, "adds nothing", "another number, or leave the term out")
    for number, term in enumerate(terms):
        if term.label in [other.label for other in terms[:number]]:
            rule_text = f"{term.label} is the name of the main reward's metric, too"
            yield Violation(term.section, term.name, rule_text, f"reward.terms.{term.label}_2...")


def _exists(term: Term) -> Iterator[Violation]:
    name, key = term.name, f"{term.section}.name"
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        fix = "bash scripts/install.sh"
        yield Violation(key, name, f"the package {package} is not installed here", fix)
    if name in REWARDS:
        if term.batch_size is not None:
            rule_text = f"{name} judges one response at a time"
            yield Violation(f"{term.section}.batch_size", term.batch_size, rule_text, "leave it out")
        return
    dotted = code.as_dotted(name)
    own = "package.module.function or path/to/file.py:function of your own"
    fix = f"{key}={dotted}" if dotted else f"one of {', '.join(REWARDS)}, or {own}"
    found = _found(name, dotted, "reward")
    if found.trouble:
        yield Violation(key, name, found.trouble, fix)
    elif isinstance(found.definition, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _takes_a_response(term, found.definition)


def _takes_a_response(term: Term, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Violation]:
    name, kwargs, own, key = term.name, term.kwargs, code.parameters(function), f"{term.section}.name"
    batch_size, is_batched = f"{term.section}.batch_size", term.batch_size is not None
    arguments, of_problem = ("responses, answers", "problems") if is_batched else ("response, answer", "problem")
    returns = "a list of numbers" if is_batched else "one number"
    call = f"a reward is called as function({arguments}, **{term.section}.kwargs), and returns {returns}"
    fix = f"def reward({arguments}): ...; with a parameter `{of_problem}` it also gets messages and columns"
    if _OF_TRL & set(own):
        fix = f"{fix}; lists as with {batch_size}=32: def reward(responses, answers): ..." if not is_batched else fix
        yield Violation(key, name, "has the signature of TRL's rewards, which judge lists", fix)
    elif _OF_VERL & set(own):
        rule_text = "has the signature of verl's rewards (data_source, solution_str, ground_truth, extra_info)"
        yield Violation(key, name, rule_text, fix)
    elif own[:1] == ["responses"] and not is_batched:
        yield Violation(key, name, "takes `responses`, and gets one response", f"{batch_size}=32 gives it lists")
    elif own[:1] == ["response"] and is_batched:
        rule_text = f"gives {name} lists, and it takes one `response`"
        yield Violation(batch_size, term.batch_size, rule_text, f"leave it out, or def reward({arguments}): ...")
    elif set(own[:1]) & _ANSWERS or set(own[1:2]) & _RESPONSES:
        yield Violation(key, name, f"takes `{own[0]}` first, where a reward gets the response", call)
    elif trouble := code.misfit(function, 2, {**kwargs, **({of_problem: None} if of_problem in own else {})}):
        yield Violation(f"{term.section}.kwargs", dict(kwargs), f"do not fit {name}: {trouble}", call)


@rule("reward", options=RolloutAlgorithmConfig)
def many_at_a_time_are_coroutines(config: Config) -> Iterator[Violation]:
    """Yield where a judging process gets several samples at a time, and none of its rewards lets another one go on."""
    at_once, terms = config.reward.concurrency, [one for one in terms_of(config.reward) if one.name not in INSTANT]
    paths = [REWARDS.get(one.name, one.name) for one in terms] if at_once > 1 else []
    found = [code.find(path).definition for path in paths if "." in path]
    if found and all(isinstance(one, ast.FunctionDef) for one in found):
        rule_text = f"is for rewards that are coroutines (async def), and {terms[0].name} is a plain function"
        rule_text += ": the samples of a process would wait for each other until reward.timeout_s"
        fix = "reward.concurrency=1, and a larger reward.processes for more at a time"
        yield Violation("reward.concurrency", at_once, rule_text, fix)


@rule("reward", "data.name", options=RolloutAlgorithmConfig)
def task_scores_its_own_problems(config: Config) -> Iterator[Violation]:
    for term in terms_of(config.reward):
        if term.name == "reasoning_gym" and config.data.name != "reasoning_gym":
            fix = "data=reasoning_gym, or reward=math or another"
            yield Violation(f"{term.section}.name", term.name, "scores the problems of data=reasoning_gym alone", fix)


@rule("reward", "data.answer_column", "environment.name", "agent.name", options=RolloutAlgorithmConfig)
def rewards_have_answers(config: Config) -> Iterator[Violation]:
    """Yield where a reward compares with the answer, and rows have none. Other environments and agents may judge."""
    judged = config.agent.name is None and config.environment.name in (None, *_ANSWERING)
    needing = [term for term in terms_of(config.reward) if term.name in _COMPARING]
    if config.data.answer_column is None and config.data.name in ROWS and judged and needing:
        rule_text = f"is null, and {needing[0].section}.name = {needing[0].name} compares responses with the answer"
        fix = "data.answer_column=answer, or a reward that needs none, such as reward=format or reward=judge"
        yield Violation("data.answer_column", None, rule_text, fix)


@rule("reward", "algorithm", "environment.name", "agent.name", options=GRPOConfig)
def what_teaches_is_rewarded(config: Config) -> Iterator[Violation]:
    """Yield where the policy learns from the reward, and there is none. Other environments and agents may judge."""
    judged = config.agent.name is None and config.environment.name in (None, *_ANSWERING)
    learns = not has_teacher(config) or getattr(config.options(GRPOConfig).loss_fn, "reward_coef", 0) > 0
    if judged and learns and all(term.name == NONE for term in terms_of(config.reward)):
        rule_text = "learns from the reward, and reward=none is 0 for every response"
        fix = "reward=exact_match or another, or algorithm=distillation, which learns from a teacher"
        # Not a key of the reward: an evaluation without one learns nothing, and is allowed.
        yield Violation("algorithm.name", config.algorithm.name, rule_text, fix)


@rule("environment", options=RolloutAlgorithmConfig)
def environment_exists(config: Config) -> Iterator[Violation]:
    name, turns = config.environment.name, config.environment.max_turns
    processes, concurrency = config.environment.processes, config.environment.concurrency
    if name is not None and processes > concurrency:
        rule_text = f"exceeds environment.concurrency = {concurrency}: some processes would never answer"
        yield Violation("environment.processes", processes, rule_text, f"environment.processes={concurrency}")
    if name is None and turns > 1:
        rule_text = "without an environment nothing is said between turns"
        yield Violation("environment.max_turns", turns, rule_text, f"environment={next(iter(ENVIRONMENTS))}")
    if name in _ANSWERING and turns == 1:
        yield Violation("environment.max_turns", turns, f"leaves no turn that reads what {name} answers", "2 or more")
    if name is None or name in ENVIRONMENTS:
        return
    dotted = code.as_dotted(name)
    found = _found(name, dotted, "environment")
    if found.trouble:
        choices = f"choose one of {', '.join(ENVIRONMENTS)}, or package.module.Class or path/to/file.py:Class"
        fix = f"environment.name={dotted}" if dotted else choices
        yield Violation("environment.name", name, found.trouble, fix)
    elif isinstance(found.definition, ast.ClassDef) and (rule_text := _without_step(found.definition)):
        yield Violation("environment.name", name, rule_text, "see nemo_rl_lite/environments/interface.py")


@rule("environment", options=RolloutAlgorithmConfig)
def environment_has_what_it_needs(config: Config) -> Iterator[Violation]:
    name, kwargs = config.environment.name, config.environment.kwargs
    needed, example = _NEEDED.get(name or "", ("", ""))
    key, given = f"environment.kwargs.{needed}", kwargs.get(needed)
    if needed and not given:
        yield Violation(key, given, f"environment={name} needs it", example)
    elif needed == "tools" and not isinstance(given, list):
        yield Violation(key, given, "must be a list of dotted paths", example)
    elif needed == "tools" and isinstance(given, list):
        for path in map(str, given):
            if trouble := code.find(path).trouble:
                yield Violation(key, path, trouble, "package.module.function of a function that can be imported")


@rule("data.tools_column", "environment.name", options=RolloutAlgorithmConfig)
def tools_of_rows_are_answered(config: Config) -> Iterator[Violation]:
    if config.data.tools_column is not None and config.environment.name is None:
        rule_text = "offers tools, and without an environment nobody answers their calls"
        fix = "environment=nemo_gym or another, or data.tools_column=null"
        yield Violation("data.tools_column", config.data.tools_column, rule_text, fix)


@rule("agent", "environment.name", options=RolloutAlgorithmConfig)
def agent_exists(config: Config) -> Iterator[Violation]:
    name, processes, concurrency = config.agent.name, config.agent.processes, config.agent.concurrency
    if name is None:
        return
    if config.environment.name is not None:
        rule_text = f"plays an episode by itself, and environment.name = {config.environment.name} would answer in it"
        yield Violation("agent.name", name, rule_text, "one of the two: environment=none, or agent.name=null")
    if processes > concurrency:
        rule_text = f"exceeds agent.concurrency = {concurrency}: some processes would never play"
        yield Violation("agent.processes", processes, rule_text, f"agent.processes={concurrency}")
    dotted = code.as_dotted(name)
    found = _found(name, dotted, "agent")
    call = "async def agent(problem, endpoint, **agent.kwargs) -> float | None"
    if found.trouble:
        fix = (
            f"agent.name={dotted}"
            if dotted
            else f"package.module.function or path/to/file.py:function of your own: {call}"
        )
        yield Violation("agent.name", name, found.trouble, fix)
    elif isinstance(found.definition, ast.FunctionDef | ast.AsyncFunctionDef) and (
        trouble := code.misfit(found.definition, 2, config.agent.kwargs)
    ):
        yield Violation("agent.name", name, f"cannot be called as agent(problem, endpoint, ...): {trouble}", call)


def _without_step(definition: ast.ClassDef) -> str:
    """Why a class has no `step` or `close` that can be called; empty where it has them, or may inherit them."""
    members, inherits = code.members(definition), definition.bases or definition.keywords
    if "step" not in members:
        return "" if inherits else "has no method step(problem, conversation)"
    for name, parameters in (("step", ("problem", "conversation")), ("close", ())):
        method = members.get(name)
        is_method = isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        if trouble := code.uncallable(method, len(parameters)) if is_method else "":
            return f"has a {name} that cannot be called as {name}({', '.join(parameters)}): {trouble}"
    return ""


def _found(name: str, dotted: str, kind: str) -> code.Found:
    if dotted:
        return code.Found("is neither a dotted path nor a file and a name in it")
    if name.endswith(".py"):
        return code.Found(f"names a file, and no {kind} in it: {name}:NAME")
    return code.find(name) if "." in name else code.Found(f"no such {kind}")
