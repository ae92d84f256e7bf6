"""What an evaluation composes: a model's configuration with the command's overrides, and what it refuses."""

import json
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_rl_lite.config.composition import compose_files
from nemo_rl_lite.config.sizes import engines, policy_ranks
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.evaluation import task
from nemo_rl_lite.evaluation.evaluate import Journal, claim
from nemo_rl_lite.evaluation.task import Evaluation, Options, compose
from nemo_rl_lite.rollout.collector import Group
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.run.serving import Served
from nemo_rl_lite.validation.compose import compose_config, restore
from tests.functional.conftest import model_folder  # noqa: F401

ONE = Options(samples=1, problems=None, temperature=None, pass_reward=1.0)


@pytest.fixture
def model(model_folder) -> Served:  # noqa: F811
    overrides = (
        "generation=vllm",
        "generation.max_new_tokens=12",
        "algorithm.seed=7",
        "algorithm.val_period=5",
    )
    config = compose_config([*overrides, "reward.processes=3", f"policy.model_name={model_folder}"])
    return Served("mine", model_folder, config)


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")
    return tmp_path / "held-out.jsonl"


def refused(model: Served, *overrides: str, options: Options = ONE) -> str:
    with pytest.raises(ConfigError) as error:
        compose(model, overrides, options)
    return str(error.value)


def test_a_runs_own_configuration_is_the_default(model):
    config = compose(model, [], ONE).config
    assert (config.data, config.reward, config.environment) == (
        model.config.data,
        model.config.reward,
        model.config.environment,
    )
    assert (config.generation.max_new_tokens, config.generation.backend) == (12, "vllm")
    assert config.algorithm.seed == 7 and not config.generation.colocated.enabled


def test_a_model_of_no_run_needs_its_data(model, file):
    foreign = replace(model, of_run=False)
    assert "data" in refused(foreign, "reward=math") and "math500" in refused(foreign)
    for given in (["data=reverse_digits"], ["data=file", f"data.validation_path={file}"]):
        compose(foreign, given, ONE)


def test_a_path_chooses_what_reads_it(model, file):
    model = replace(model, config=replace(model.config, data=replace(model.config.data, system_prompt="Think.")))
    found = compose(model, [f"data.validation_path={file}"], ONE).config.data
    assert (found.name, found.validation_path, found.system_prompt) == ("file", str(file), "Think.")
    assert "data.validation_split" in refused(model, "data.path=someone/problems")
    assert compose(model, ["data.validation_path=null"], ONE).config.data.name == "reverse_digits"
    # Someone who names the default means it.
    named = compose(model, ["data=reverse_digits", f"data.validation_path={file}"], ONE)
    assert named.config.data.name == "reverse_digits"


def test_what_is_asked_is_said_first(model, file):
    options = Options(samples=2, problems=None, temperature=0.5, pass_reward=1.0)
    said = compose(model, ["data=file", f"data.validation_path={file}"], options).describe(7)
    for part in ("7 held-out problems", str(file), "reward exact_match", "2 responses", "12 tokens", "temperature 0.5"):
        assert part in said
    assert "greedy" in compose(model, [], replace(ONE, temperature=0.0)).describe(7)


def test_overrides_lie_over_it(model, file):
    given = ["data=file", f"data.validation_path={file}", "reward=last_number", "generation.temperature=0.5"]
    config = compose(model, [*given, "algorithm.seed=3"], ONE).config
    assert (config.data.name, config.data.validation_path, config.data.train_path) == ("file", str(file), None)
    assert (config.reward.name, config.generation.temperature, config.algorithm.seed) == ("last_number", 0.5, 3)
    # What the command does not name is the run's.
    assert config.generation.max_new_tokens == 12


@pytest.mark.parametrize(
    ("there", "overrides", "expected"),
    [
        (8, [], (8, 2)),
        (0, [], (8, 2)),
        (4, [], (4, 1)),
        (7, [], (4, 1)),
        (2, [], (4, 1)),
        (8, ["cluster.gpus_per_node=4"], (4, 1)),
        (8, ["generation.data_parallel_size=1"], (4, 1)),
        (8, ["generation.vllm_cfg.tensor_parallel_size=1"], (8, 8)),
        (8, ["cluster.num_nodes=2"], (8, 4)),
    ],
)
def test_a_run_on_gpus_is_evaluated_on_all_that_it_had_on_a_node_and_that_are_here(
    model, monkeypatch, there, overrides, expected
):
    monkeypatch.setattr(task, "gpu_count", lambda: there)
    composed = OmegaConf.to_container(compose_files(["recipes=grpo-qwen3-30b-a3b-2n8g-ep8"]), resolve=True)
    evaluation = compose(replace(model, config=restore(json.dumps(composed))), overrides, ONE)
    config, tokens = evaluation.config, composed["generation"]["max_new_tokens"]  # pyrefly: ignore
    assert (config.cluster.gpus_per_node, engines(config)) == expected
    assert policy_ranks(config) == 0 and config.generation.max_new_tokens == tokens
    # The number of engines decides nothing that is sampled.
    if not any("tensor_parallel" in one for one in overrides):
        assert evaluation.identity()["generation"]["vllm_cfg"]["tensor_parallel_size"] == 4
    assert not {"data_parallel_size", "colocated"} & set(evaluation.identity()["generation"])


def test_an_engine_on_two_nodes_is_evaluated_on_two(model, monkeypatch):
    monkeypatch.setattr(task, "gpu_count", lambda: 1)
    two_nodes = ["recipes=grpo-qwen3-30b-a3b-2n8g-ep8", "cluster.gpus_per_node=2"]
    composed = OmegaConf.to_container(compose_files(two_nodes), resolve=True)
    config = compose(replace(model, config=restore(json.dumps(composed))), [], ONE).config
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node, engines(config)) == (2, 2, 1)


def test_engines_on_cpus_are_those_that_the_configuration_names(model):
    assert engines(compose(model, [], ONE).config) == 1
    two = replace(model.config, generation=replace(model.config.generation, data_parallel_size=2))
    evaluation = compose(replace(model, config=two), [], ONE)
    assert engines(evaluation.config) == 2
    assert evaluation.usual_folder() == compose(model, [], ONE).usual_folder()
    assert engines(compose(model, ["generation.data_parallel_size=2"], ONE).config) == 2


def test_secrets_are_neither_written_nor_guessed(model, tmp_path):
    (tmp_path / "mine.py").write_text("def ask(response, answer, api_key):\n    return 1.0\n")
    reward, key = f"reward.name={tmp_path / 'mine.py'}:ask", "reward.kwargs.api_key"
    evaluation = compose(model, [reward, f"{key}=sk-12345"], ONE)
    assert evaluation.config.reward.kwargs == {"api_key": "sk-12345"}
    assert "sk-12345" not in json.dumps(evaluation.identity())
    # A run's configuration was written down without it.
    assert f"{key} = 'REDACTED'\n      is a secret" in refused(model, reward, f"{key}=REDACTED")


def test_a_runs_texts_are_taken_as_they_are(model):
    text = "Write ${HOME} in your answer, and \\boxed{}."
    data = replace(model.config.data, system_prompt=text)
    config = compose(replace(model, config=replace(model.config, data=data)), ["data.too_long=drop"], ONE).config
    assert config.data.system_prompt == text and config.data.too_long == "drop"


@pytest.mark.parametrize("task", ["math500"])
def test_tasks_of_the_hub_compose(model, task):
    evaluation = compose(model, [f"data={task}", "reward=math"], ONE)
    data = evaluation.config.data
    assert data.name == "hub" and data.validation_split and data.prompt_column == "problem"
    assert data.answer_column == "answer" and "boxed" in (data.system_prompt or "")


def test_keys_that_an_evaluation_does_not_read_are_noted(model, capsys):
    given = ["policy.megatron_cfg.optimizer.lr=1e-4", "recipes=grpo-tiny-1n0g-cpu", "cluster.cpu_ranks=2"]
    assert compose(model, given, ONE).identity() == compose(model, [], ONE).identity()
    said = capsys.readouterr().err
    assert "note: without effect here: policy.megatron_cfg.optimizer.lr, recipes, cluster.cpu_ranks" in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data=gsm"], "data = 'gsm'"),
        (["data.trian_path=x"], "did you mean"),
        (["data=file"], "data.validation_path"),
        (["data=hub", "data.path=a/b"], "data.validation_split"),
        (["data=file", "data.validation_path=missing.jsonl"], "data.validation_path = 'missing.jsonl'"),
        (["generation.temperature=9"], "generation.temperature = 9"),
        (["generation.max_new_tokens=4000"], "generation.max_new_tokens = 4000"),
        (["policy.precision=float8"], "policy.precision"),
    ],
)
def test_what_an_evaluation_cannot_use_is_refused(model, overrides, said):
    assert said in refused(model, *overrides)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (replace(ONE, samples=0), "--samples = 0"),
        (replace(ONE, problems=0), "--problems = 0"),
        (replace(ONE, temperature=5.0), "fix: --temperature 2"),
        (replace(ONE, temperature=-1.0), "--temperature = -1"),
        (replace(ONE, temperature=0.0, samples=2), "--samples = 2\n      greedy responses"),
    ],
)
def test_options_that_make_no_sense_are_refused(model, options, said):
    assert said in refused(model, options=options)


def test_the_usual_folder_is_that_of_one_configuration(model):
    first, again = compose(model, [], ONE).usual_folder(), compose(model, [], ONE).usual_folder()
    other = compose(model, ["generation.top_p=0.9"], ONE).usual_folder()
    assert first == again != other and first.name.startswith("mine-reverse_digits-")


def test_a_chat_template_of_the_command_is_part_of_what_an_evaluation_is(model, tmp_path):
    (template := tmp_path / "own.jinja").write_text("{{ messages }}")
    given = f"policy.tokenizer.chat_template={template}"
    evaluation = compose(model, [given], ONE)
    first = evaluation.usual_folder()
    assert evaluation.config.policy.tokenizer.chat_template == str(template)
    assert first == evaluation.usual_folder() != compose(model, [], ONE).usual_folder()
    template.write_text("{{ messages[0] }}")
    assert compose(model, [given], ONE).usual_folder() != first


def group(problem: Problem, *rewards: float | None) -> Group:
    played = Future()
    played.set_result(None)
    episodes = [Episode(problem, [1, 2], 1, reward=reward) for reward in rewards]
    return Group(None, played, episodes)  # pyrefly: ignore


def test_a_folder_is_of_one_evaluation(model, tmp_path):
    folder = tmp_path / "out"
    claim(folder, compose(model, ["generation.top_k=3"], ONE).identity())
    # Nothing has been sampled.
    claim(folder, compose(model, [], ONE).identity())
    asked = [Problem(chat("one"), "1")]
    Journal(folder, asked).keep([group(asked[0], 1.0)])
    claim(folder, compose(model, [], ONE).identity())
    other: Evaluation = compose(model, ["generation.top_p=0.9"], replace(ONE, samples=2))
    with pytest.raises(ConfigError, match=r"--samples = 2\n      .*was started with 1") as error:
        claim(folder, other.identity())
    assert len(error.value.violations) == 1
    (tmp_path / "config.json").write_text(json.dumps(asdict(model.config)))
    (tmp_path / "command.txt").touch()
    with pytest.raises(ConfigError, match="is the folder of a run"):
        claim(tmp_path, other.identity())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is neither empty nor the folder of an evaluation"):
        claim(tmp_path / "notes", other.identity())


def test_other_code_of_a_reward_is_another_evaluation(model, tmp_path):
    file, folder, asked = tmp_path / "mine.py", tmp_path / "out", [Problem(chat("one"), "1")]
    file.write_text("def score(response, answer):\n    return 1.0\n")
    given = [f"reward.name={file}:score"]
    before = compose(model, given, ONE).usual_folder()
    claim(folder, compose(model, given, ONE).identity())
    Journal(folder, asked).keep([group(asked[0], 1.0)])
    claim(folder, compose(model, given, ONE).identity())
    file.write_text("def score(response, answer):\n    return 0.5\n")
    with pytest.raises(ConfigError, match=r"code of reward\.name = '\w{8}'\n.*was started with '\w{8}'.*\n.*--output"):
        claim(folder, compose(model, given, ONE).identity())
    assert before != compose(model, given, ONE).usual_folder()


def test_groups_without_a_failure_are_kept(tmp_path):
    asked = [Problem(chat(f"problem {number}"), str(number)) for number in range(3)]
    groups = [group(asked[0], 1.0, 0.0), group(asked[1], 1.0, None)]
    Journal(tmp_path, asked).keep(groups)
    assert list(Journal(tmp_path, asked).done) == [0]
    journal = Journal(tmp_path, asked)
    journal.keep([*groups[:1], group(asked[1], 1.0, 0.5)])
    # Soon afterwards nothing is written, unless it must be.
    more = [*groups[:1], group(asked[1], 1.0, 0.5), group(asked[2], 0.0, 0.0)]
    journal.keep(more)
    assert list(Journal(tmp_path, asked).done) == [0, 1]
    journal.keep(more, at_once=True)
    done = Journal(tmp_path, asked).episodes
    assert [[one.reward for one in done[number]] for number in range(3)] == [[1.0, 0.0], [1.0, 0.5], [0.0, 0.0]]
    with pytest.raises(ConfigError, match="has changed since the evaluation"):
        Journal(tmp_path, asked[::-1])
    with pytest.raises(ConfigError, match="has changed since the evaluation"):
        Journal(tmp_path, asked[:2])
