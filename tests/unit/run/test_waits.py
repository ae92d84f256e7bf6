"""Who waits for whom, from the files of a run."""

import pytest

from nemo_rl_lite.observability.trackers import with_every_age
from nemo_rl_lite.report.record import PARTS, STEPS, read_run
from nemo_rl_lite.rollout.store import RolloutFiles
from tests.unit.observability.rollouts import make_rollout
from tests.unit.run.run_folders import make_asynchronous_run


def found_in(folder) -> dict:
    found = read_run(folder).waits
    assert found is not None
    return found


def test_both_sides_are_told_in_seconds_since_the_first_step(tmp_path):
    found = found_in(make_asynchronous_run(tmp_path / "run"))
    assert found["seconds"] == 30 and found["steps"] == [[1, 0, 10], [2, 10, 20], [3, 20, 30]]
    assert found["policy"][:3] == [["wait", 0, 1, 1], ["train", 1, 8, 1], ["refit", 8, 10, 1]]
    assert found["paused"] == [[8.5, 10], [18.5, 20], [28.5, 30]]
    # Engines that are paused are not idle, and no rollout follows the one of the last step.
    assert found["idle"] == [[0, 0.5], [4.5, 8.5], [10, 10.5], [14.5, 18.5], [20, 28.5]]
    assert found["shares"] == pytest.approx(
        {"policy waits": 0.1, "engines idle": 17.5 / 30, "engines paused": 0.15}, abs=1e-3
    )


def test_requests_are_counted_by_the_step_that_trains_on_them(tmp_path):
    found = found_in(make_asynchronous_run(tmp_path / "run"))
    # The first step's rollout was complete before the step began.
    assert [one["step"] for one in found["requests"]] == [2, 3]
    first, counts = found["requests"][0]["counts"]
    assert first == 0.5 * PARTS / 30 and max(counts) == 2 and sum(counts) * 30 / PARTS == pytest.approx(2 * 4, abs=0.1)


@pytest.mark.parametrize("state", ["running", "failed", "stopped"])
def test_where_rollouts_are_under_way_only_what_is_known_is_told(tmp_path, state):
    """The rollout of step 4 may have begun as soon as that of step 3, whose file is the newest."""
    found = found_in(make_asynchronous_run(tmp_path / "run", state=state))
    assert found["steps"] == [[1, 0, 10]] and found["idle"] == [[0, 0.5], [4.5, 8.5]]


def test_nothing_is_told_of_the_time_between_two_processes(tmp_path):
    folder = make_asynchronous_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "timing/setup/total": 30.0}\n')
    assert found_in(folder)["steps"] == [[3, 0, 10]]


def test_of_a_long_run_the_newest_steps_are_told(tmp_path):
    found = found_in(make_asynchronous_run(tmp_path / "run", steps=3 * STEPS))
    assert [step for step, _, _ in found["steps"]] == list(range(2 * STEPS + 1, 3 * STEPS + 1))
    assert {step for *_, step in found["policy"]} == {step for step, _, _ in found["steps"]}


def test_a_rollout_from_a_checkpoint_has_no_times_of_its_own(tmp_path):
    folder = make_asynchronous_run(tmp_path / "run")
    rollout = make_rollout(["a"], [0.0])
    rollout.episodes[0].spans = []
    RolloutFiles(folder, None, done=3).write(0, "validation", rollout)
    assert len(found_in(folder)["steps"]) == 3


def test_a_step_without_tokens_of_an_age_has_no_share_of_it():
    entries = [{"train/age_0/tokens_share": 1.0}, {"train/age_10/tokens_share": 0.5, "train/age_9/tokens_share": 0.5}]
    filled, names = with_every_age([*entries, {"validation/accuracy": 1.0}])
    assert list(names.values()) == ["age 0", "age 9", "age 10"]
    assert [[entry.get(name) for name in names] for entry in filled] == [[1, 0, 0], [0, 0.5, 0.5], [None] * 3]
