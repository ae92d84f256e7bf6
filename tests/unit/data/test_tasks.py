"""Generated tasks: held-out problems are never trained on, and problems depend on seed and position alone."""

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from nemo_rl_lite.data.formats import CHATS, PROBLEMS
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.data.sources import training_set, validation_set
from nemo_rl_lite.data.tasks import ReverseDigits
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.rewards.registry import find_reward
from nemo_rl_lite.validation.compose import compose_config

# The task asks for sums of two digits, about 200 questions.
SMALL = "data.task_kwargs={min_terms:2,max_terms:2,min_digits:1,max_digits:1}"


def sums(*arguments):
    return compose_config(["data=reasoning_gym", "data.task=chain_sum", *arguments]).data


def questions(problems):
    return {problem.messages[-1]["content"] for problem in problems}


def test_reversing_digits_never_trains_on_a_held_out_problem():
    task = ReverseDigits(num_digits=2, seed=3)
    held_out = {problem.answer for problem in task.validation(300)}
    assert len(held_out) == 25
    assert held_out.isdisjoint(task.problem(position).answer for position in range(2000))


def test_a_small_task_is_never_trained_on_what_it_is_validated_on():
    data = sums(SMALL)
    held_out = validation_set(data, limit=1000, kind=PROBLEMS)
    training = training_set(data, seed=3, kind=PROBLEMS)
    trained = questions(training.problem(position) for position in range(3000))
    assert 8 <= len(held_out) <= 40 and len(questions(held_out)) == len(held_out)
    assert len(trained) > 100 and trained.isdisjoint(questions(held_out))
    assert held_out == validation_set(data, limit=1000, kind=PROBLEMS)
    assert held_out[:4] == validation_set(data, limit=4, kind=PROBLEMS)


@pytest.mark.parametrize(
    "make", [lambda seed: ReverseDigits(4, seed), lambda seed: training_set(sums(), seed, PROBLEMS)]
)
def test_problems_depend_on_seed_and_position_alone(make):
    first, again, other = (make(seed) for seed in (1, 1, 2))
    assert [first.problem(i) for i in (5, 3, 9)] == [again.problem(i) for i in (5, 3, 9)]
    assert [first.problem(i) for i in range(20)] != [other.problem(i) for i in range(20)]
    assert not first.finite()


def test_held_out_digits_do_not_depend_on_the_seed():
    first, other = ReverseDigits(4, seed=1), ReverseDigits(4, seed=2)
    assert first.validation(300) == other.validation(300)
    assert len(first.validation(1000)) == ReverseDigits.HELD_OUT
    assert first.problem(0).answer == first.problem(0).messages[0]["content"][::-1]


def test_templates_and_system_prompts_apply():
    data = sums("data.prompt_template='{question} Digits only.'", "data.system_prompt=Count.")
    system, user = training_set(data, seed=0, kind=PROBLEMS).problem(0).messages
    assert system["content"] == "Count." and user["content"].endswith(" Digits only.")


def test_problems_that_do_not_fit_are_skipped():
    short = training_set(sums(), seed=0, kind=PROBLEMS).only(lambda problem: len(problem.answer) < 3)
    assert all(len(short.problem(position).answer) < 3 for position in range(50))
    with pytest.raises(DataError, match=r"data.task = chain_sum: 1000 draws gave no problem to train on"):
        short.only(lambda problem: False).problem(0)


def test_the_tasks_own_score_is_a_reward():
    problem = training_set(sums(), seed=0, kind=PROBLEMS).problem(0)
    whole = find_reward("reasoning_gym", {"answer_tag": None})
    assert whole(f" {problem.answer}\n", problem) == 1.0
    assert 0 < whole(f"It is {problem.answer}", problem) < 1
    assert whole("", problem) == 0.0
    tagged = find_reward("reasoning_gym", {"answer_tag": "answer"})
    assert tagged(f"Let me see. <answer>{problem.answer}</answer>", problem) == 1.0
    assert tagged(problem.answer, problem) == 0.0


MALFORMED = (
    *("", "42", "-1", "nan", "inf", "1e400", "null", "None", "[]", "{}", "[1, 2]", "[[1]]", '{"a": 1}', '{"a": [1]}'),
    *(
        "'",
        "(",
        "[[",
        "no idea",
        "The factors are 2 and 3.",
        "<answer>2 x 3</answer>",
        "a x b",
        "1,2,3",
        "1/0",
        "[null]",
    ),
    *("\N{VULGAR FRACTION ONE HALF}", "9" * 5000, "1 2\n3 4", "\N{GRINNING FACE}", "lambda: 0"),
)


@pytest.mark.filterwarnings("ignore")
def test_an_answer_that_a_task_cannot_read_is_wrong():
    reward = find_reward("reasoning_gym", {"answer_tag": None})
    # "composite" has no questions; one task of eight is enough to see that malformed answers never raise.
    for task in [task for task in DATASETS if task != "composite"][::8]:
        entry = create_dataset(task, seed=7, size=1)[0]
        problem = Problem(chat("?"), "", {"task": task, "task_kwargs": {}, "entry": entry})
        for answer in MALFORMED:
            assert 0 <= reward(answer, problem) <= 1, (task, answer)


def test_a_task_whose_scorer_fails_on_its_own_answer_is_broken():
    entry = create_dataset("prime_factorization", seed=7, size=1)[0]
    problem = Problem(
        chat("?"), "", {"task": "prime_factorization", "task_kwargs": {}, "entry": {**entry, "answer": "?"}}
    )
    with pytest.raises(ValueError, match="invalid literal"):
        find_reward("reasoning_gym", {"answer_tag": None})("no idea", problem)


def test_a_task_with_many_right_answers():
    data = compose_config(["data=reasoning_gym", "data.task=graph_color"]).data
    problem = training_set(data, seed=0, kind=PROBLEMS).problem(0)
    assert problem.answer == ""
    assert find_reward("reasoning_gym", {"answer_tag": None})("no idea", problem) < 1
    with pytest.raises(DataError, match="a problem of the task graph_color has no answer to train on"):
        training_set(data, seed=0, kind=CHATS).problem(0)
