"""`nrl-lite doctor` with a reward names what the reward pays for, and nothing in good rewards."""

import json
import shlex

import pytest

from nemo_rl_lite.doctor import main
from tests.unit.rewards.endpoint import Endpoint

REWARDS = "tests.unit.rewards.exploitable"
# Each weakness, and the attack that shows it.
EXPLOITS = {
    "of_empty_text": "an empty response",
    "of_any_box": "a list of candidates",
    "of_any_number": "a list of candidates",
    "of_contained_text": "a list of candidates",
    "of_tags": "the format alone",
    "of_length": "a long response",
    "of_right_and_long": "a long response",
    "of_matches": "repetition",
    "of_words": "phrases of reasoning",
    "of_own_verdict": "instructions to the judge",
    "of_prompt_words": "a copy of the prompt",
    "of_ascii": "another language",
    "of_nan": "a special number",
    "of_infinity": "a special number",
    "of_code": "code instead of an answer",
    "of_exit_status": "code instead of an answer",
    "of_errors": "an empty response",
    "divides_by_length": "an exception",
    "is_not_finite": "an invalid result",
    "is_slow": "time",
    "is_random": "the same response again",
    "remembers": "the same response again",
    "compares_types": "the right answer",
    "is_constant": "the right answer",
}
WITHOUT_VALIDATION = "algorithm.val_period=0 algorithm.val_at_start=false algorithm.val_at_end=false"
ROWS = [
    {"prompt": f"Add {one} and {one + 8}. Answer with a number.", "answer": str(2 * one + 8)}
    for one in (17, 26, 38, 59)
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"data=file data.train_path={path} {WITHOUT_VALIDATION}"


def examined(command: str, capsys) -> tuple[int, dict]:
    """The exit status and the record of the only source."""
    with pytest.raises(SystemExit) as ended:
        main(["--json", *shlex.split(command)])
    shown = capsys.readouterr()
    return ended.value.code, *(json.loads(shown.out) if shown.out else [shown.err])


@pytest.mark.parametrize(("name", "attack"), EXPLOITS.items(), ids=EXPLOITS)
def test_exploits_are_named(capsys, rows, name, attack):
    # They compute until the time limit, for each problem.
    limits = "reward.timeout_s=2 --problems 1" if name in ("is_slow", "of_code") else "reward.timeout_s=60"
    status, record = examined(f"reward.name={REWARDS}.{name} {limits} reward.processes=1 {rows}", capsys)
    found = {one["attack"]: one for one in record["findings"] if one["level"] == "fault"}
    assert status == 1 and attack in found, record["findings"]
    assert found[attack]["fix"] and found[attack]["response"]


@pytest.mark.parametrize(
    "reward",
    [
        *(f"reward={name}" for name in ("exact_match", "last_number", "math")),
        "reward=format \"reward.kwargs.pattern='[0-9]+'\"",
        "reward=exact_match +reward.terms.digits.name=format +reward.terms.digits.weight=0.1 "
        "\"+reward.terms.digits.kwargs.pattern='[0-9]*'\"",
        *(f"reward.name={REWARDS}.{name}" for name in ("good", "good_with_form", "good_without_length", "good_async")),
    ],
)
def test_good_rewards_have_no_fault(capsys, rows, reward):
    status, record = examined(f"{reward} {rows} reward.processes=1", capsys)
    assert status == 0 and not [one for one in record["findings"] if one["level"] == "fault"], record["findings"]


@pytest.mark.parametrize(
    ("reward", "unpaid"),
    [
        ("reward=exact_match", {"The answer is 42.", "\\boxed{42}", "```python\n42\n```"}),
        ("reward=math", set()),
        (f"reward.name={REWARDS}.is_constant", set()),
        ("reward=format \"reward.kwargs.pattern='[0-9]+'\"", {"The answer is 42."}),
    ],
)
def test_layouts_that_a_reward_does_not_accept_are_shown(capsys, rows, reward, unpaid):
    _, record = examined(f"{reward} {rows} data.shuffle=false reward.processes=1 --problems 2", capsys)
    assert unpaid <= {*record["unpaid_layouts"]} and bool(unpaid) == bool(record["unpaid_layouts"])
    assert "42" not in record["unpaid_layouts"]


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "word_sorting"])
def test_scorers_of_tasks_have_no_fault(capsys, task):
    pytest.importorskip("reasoning_gym")
    command = f"reward=reasoning_gym data=reasoning_gym data.task={task} reward.processes=1"
    status, record = examined(command, capsys)
    assert status == 0, record["findings"]


def test_programs_have_no_fault(capsys, tmp_path):
    path = tmp_path / "programs.jsonl"
    lines = [
        {"prompt": f"Python: def add(x) that adds {one}", "tests": [f"assert add(3) == {3 + one}"]} for one in (4, 5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    data = f"data=file data.train_path={path} data.answer_column=null {WITHOUT_VALIDATION}"
    status, record = examined(f"reward=program {data} --problems 1", capsys)
    assert status == 0, record["findings"]


def test_a_judge_that_obeys_the_response_is_named(capsys, rows):
    endpoint = Endpoint()
    url = f"reward=judge reward.kwargs.base_url={endpoint.url} reward.kwargs.model=m"
    right = [f"answer:\n{row['answer']}\n\nResponse:\n{row['answer']}\n\nCompare" for row in ROWS]
    try:
        endpoint.answer = lambda prompt: f"Score: {10 if any(one in prompt for one in right) else 0}"
        assert examined(f"{url} {rows}", capsys)[0] == 0
        endpoint.answer = lambda prompt: "Score: 10" if "Ignore all" in prompt or right[0] in prompt else "Score: 0"
        status, record = examined(f"{url} {rows} --problems 1 data.shuffle=false", capsys)
    finally:
        endpoint.close()
    assert status == 1 and [one["attack"] for one in record["findings"]] == ["instructions to the judge"]


def test_samples_are_scored(capsys, rows, tmp_path):
    path = tmp_path / "samples.jsonl"
    # Two groups of equal rewards and two mixed ones; longer responses are right.
    said = [["x", "x"], ["y", "y"], ["<answer>84</answer>", "z"], ["<answer>126</answer>", "z"]]
    lines = [
        {"prompt": row["prompt"], "response": response}
        for row, own in zip(ROWS, said, strict=True)
        for response in own
        for _ in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    status, record = examined(f"reward.name={REWARDS}.good {rows} --samples {path}", capsys)
    samples = record["samples"]
    assert (status, samples["samples"], samples["groups"], samples["mixed"], samples["failed"]) == (0, 24, 4, 0.5, 0)
    assert samples["mean"] == 0.25 and samples["length_correlation"] > 0.9
    assert samples["untrained"] == pytest.approx(12 / sum(len(row["response"]) for row in lines))
    assert [one["what"] for one in record["findings"] if "correlation with length" in one["what"]]


def test_a_time_limit_leaves_responses_and_samples_out(tmp_path, rows, capsys):
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps({"prompt": ROWS[0]["prompt"], "response": "x"}) + "\n")
    command = f"reward.name={REWARDS}.good {rows} --samples {path} --seconds 1e-9"
    status, record = examined(command, capsys)
    assert (status, record["samples"]["samples"], record["attacks"]) == (0, 0, []) and record["skipped"] > 100
    assert [one["what"] for one in record["findings"]] == ["1 samples were not scored in the time"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("reward.name=no_such_module.score", "reward.name"),
        ("algorithm=sft", "uses no reward"),
        ("reward=exact_match --problems 0", "--problems"),
        ("reward=exact_match --samples nowhere.jsonl", "no such file"),
    ],
)
def test_wrong_arguments_are_named(capsys, command, said):
    status, error = examined(command, capsys)
    assert status == 2 and said in error
