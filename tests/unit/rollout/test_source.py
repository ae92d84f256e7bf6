"""When rollouts are generated, with which weights, and what a checkpoint keeps of them."""

import asyncio
import random
import threading
import time

import pytest

from nemo_rl_lite.checkpoint.store import Checkpoints, CheckpointStore, Retention
from nemo_rl_lite.errors import CheckpointError, EngineError, WorkerError
from nemo_rl_lite.rollout.play import SingleTurn
from nemo_rl_lite.rollout.queue import AsyncRolloutSource, Staleness
from nemo_rl_lite.rollout.saved import load_rollouts
from nemo_rl_lite.rollout.source import OnPolicy, RolloutSource
from tests.unit.checkpoint.test_checkpoints import NotingPolicy
from tests.unit.rollout.fleet import Fleet, asked, sampler, versions

STEPS = 6
ONE_STEP_OFF, IN_FLIGHT = Staleness(1, in_flight=False), Staleness(2, in_flight=True)
PARTIAL = Staleness(2, in_flight=True, is_partial=True)


def silent(_: str) -> None: ...


@pytest.fixture
def begin():
    """Returns a source of a run that has taken `done` steps and has published their weights; it is closed at the end of
    the test."""
    sources = []

    def make(
        fleet,
        staleness=ONE_STEP_OFF,
        done=0,
        state=None,
        saved=(),
        steps=STEPS,
        stall_s=60.0,
        saves_begun=True,
        given_back=(),
        **options,
    ) -> AsyncRolloutSource:
        own = sampler(fleet, state, **options)
        own.order.give_back(given_back)
        source = AsyncRolloutSource(own, fleet, staleness, done, steps, saved, stall_s, saves_begun)
        sources.append(source)
        source.publish(done)
        return source

    yield make
    for source in sources:
        source.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


def taken(source: RolloutSource, steps, trains_s: float = 0.0) -> list:
    """Run the loop's calls; returns the rollouts."""
    found = []
    for step in steps:
        found.append(source.take(step, silent))
        source.finish_generation()
        time.sleep(trains_s)
        source.wait_until_idle(silent)
        source.publish(step)
    return found


def contents(rollouts) -> list:
    """All that training sees."""
    return [
        (one.tokens, turn.logprobs.tolist(), one.reward)
        for own in rollouts
        for one in own.episodes
        for _, turn in one.turns
    ]


def prompts(rollouts) -> list[str]:
    return [text for rollout in rollouts for text in asked(rollout)]


def first(count: int) -> list[str]:
    return [f"p {position}" for position in range(count)]


def test_on_policy_every_rollout_is_sampled_by_the_newest_weights():
    fleet = Fleet()
    source = OnPolicy(sampler(fleet), fleet)
    source.publish(0)
    found = taken(source, range(1, 7))
    assert [versions(rollout) for rollout in found] == [{step} for step in range(6)] and prompts(found) == first(18)


def test_one_step_off_they_are_one_step_older_and_none_is_begun_in_vain(begin):
    source = begin(Fleet())
    found = taken(source, range(1, 7))
    assert [versions(rollout) for rollout in found] == [{max(step - 2, 0)} for step in range(1, 7)]
    assert prompts(found) == first(18) and source._sampler.order.state()["position"] == 18


def test_one_step_off_a_rollout_depends_on_nothing_else_than_on_policy(begin):
    fleet = Fleet()
    on_policy = OnPolicy(sampler(fleet), fleet)
    on_policy.publish(0)
    assert contents(taken(begin(Fleet()), range(1, 7))) == contents(taken(on_policy, range(1, 7)))


def test_the_time_of_a_rollout_has_no_pauses(begin):
    fleet = Fleet(capacity=6)
    fleet.replicas[0].seconds = 0.01
    source = begin(fleet, PARTIAL)
    source.take(1, silent)
    source.finish_generation()
    unfinished = source._prefetcher.tasks()
    time.sleep(1)
    source.publish(1)
    new = [one for one in source._prefetcher.tasks() if one not in unfinished]
    assert [one.paused_s >= 1 for one in unfinished] == [True, True] and [one.paused_s for one in new] == [0]


@pytest.mark.parametrize("staleness", [ONE_STEP_OFF, IN_FLIGHT])
def test_the_next_rollout_is_generated_while_a_step_trains(begin, staleness):
    fleet = Fleet()
    source = begin(fleet, staleness)
    source.take(1, silent)
    time.sleep(1)
    # The policy's training would be here. It has not published weights, and the rollout is there without a further
    # report of the engine.
    fleet.replicas[0].seconds = 60
    begun = time.monotonic()
    assert len(source.take(2, silent).episodes) == 6 and time.monotonic() - begun < 30


@pytest.mark.parametrize("staleness", [IN_FLIGHT, PARTIAL])
def test_in_flight_responses_continue_with_new_weights_and_none_is_older_than_allowed(begin, staleness):
    """The weights of a token are named, whoever sampled the ones before it."""
    found = taken(begin(Fleet(2), staleness, steps=12), range(1, 13), trains_s=0.003)
    assert prompts(found) == first(36)
    sampled = [turn for rollout in found for one in rollout.episodes for _, turn in one.turns]
    assert all(list(turn.versions) == sorted(turn.versions) for turn in sampled)
    assert any(len(turn.versions) > 1 for turn in sampled), "no response has seen two versions"
    for step, rollout in enumerate(found, start=1):
        ages = rollout.ages(step - 1)
        assert 0 <= ages["trajectory_age_mean"] <= ages["trajectory_age_max"] <= 2


def test_partial_rollouts_leave_the_device_to_the_policy_and_lose_no_token(begin):
    fleet = Fleet()
    source, found, engine = begin(fleet, PARTIAL), [], fleet.replicas[0]
    for step in range(1, STEPS + 1):
        found.append(source.take(step, silent))
        assert source.finish_generation() == {"engine/kv_cache": 4.0}
        sampled = engine.sampled
        time.sleep(0.05)
        assert engine.sampled == sampled, "the engine has worked while the policy trained"
        assert source.publish(step)["paused_s"] >= 0.05
    assert fleet.refitted == list(range(STEPS + 1))
    trained = sum(len(turn.tokens) for rollout in found for one in rollout.episodes for _, turn in one.turns)
    assert engine.sampled == trained, "a token was sampled twice"


def test_partial_rollouts_wake_the_engines_for_what_a_rollout_has_lost(begin):
    fleet = Fleet()
    source = begin(fleet, PARTIAL)
    source.take(1, silent)
    source.finish_generation()
    assert len(source.take_again(1, silent).episodes) == 6 and fleet.refitted == [0, 0]


def test_no_more_rollouts_exist_than_the_age_allows(begin):
    source = begin(Fleet(), IN_FLIGHT, steps=100)
    time.sleep(0.3)
    # Three prompts per step: those of three steps have begun, and one more with new weights.
    assert source._sampler.order.state()["position"] == 9
    source.take(1, silent)
    source.publish(1)
    assert source._sampler.order.state()["position"] == 12


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("staleness", [ONE_STEP_OFF, IN_FLIGHT, PARTIAL])
def test_a_resumed_run_trains_on_every_prompt_once(tmp_path, begin, published, staleness):
    """A checkpoint is saved before the step's weights are published, or, where a signal ends the run, after it."""
    source = begin(Fleet(), staleness)
    before = taken(source, range(1, 3))
    before.append(source.take(3, silent))
    if published:
        source.wait_until_idle(silent)
        source.publish(3)
    state = source.save(tmp_path)
    source.close()
    again = begin(Fleet(), staleness, 3, state, load_rollouts(tmp_path))
    found = [*before, *taken(again, range(4, 7))]
    assert prompts(found) == first(18)
    whole = taken(begin(Fleet(), staleness), range(1, 7))
    assert contents(found) == contents(whole), "a response follows from the run, its step and its numbers"


def test_a_checkpoint_of_prompts_alone_has_every_prompt_once(tmp_path, begin):
    source = begin(Fleet(), IN_FLIGHT, saves_begun=False)
    before = taken(source, range(1, 3))
    state = source.save(tmp_path)
    source.close()
    assert len(state["ahead"]) == 9 and not list(tmp_path.iterdir()) and not load_rollouts(tmp_path)
    fleet = Fleet()
    again = begin(fleet, IN_FLIGHT, 2, state, given_back=state["ahead"])
    assert prompts([*before, *taken(again, range(3, 7))]) == first(18)


def test_a_full_disk_is_told_of_and_training_goes_on(tmp_path, begin):
    """The rollouts are what does not fit. The next checkpoint, with space again, has all that it needs."""
    source, said, full = begin(Fleet(), IN_FLIGHT), [], True

    def save(folder):
        for step in range(1, STEPS + 1) if full else ():
            (folder / f"rollout-{step:08d}.parquet").symlink_to("/dev/full")
        return source.save(folder)

    store = CheckpointStore(tmp_path, Retention(2, 0, None, True))
    checkpoints = Checkpoints(store, NotingPolicy(), 1, True, {}, said.append, rollouts=save)
    found = taken(source, [1])
    checkpoints.save(1)
    assert "step 1 was not written: the disk is full" in said[0] and not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="step 1 was not written"):
        checkpoints.require()
    full = False
    found += taken(source, [2])
    checkpoints.save(2)
    checkpoints.finish()
    checkpoints.require()
    saved = store.latest()
    again = begin(Fleet(), IN_FLIGHT, 2, saved.record["rollouts"], load_rollouts(saved.path))
    assert prompts([*found, *taken(again, range(3, 7))]) == first(18)


def test_rollouts_that_are_older_than_the_run_allows_are_sampled_again(tmp_path, begin, caplog):
    source = begin(Fleet(), Staleness(4, in_flight=True))
    source.take(1, silent)
    time.sleep(0.3)
    state = source.save(tmp_path)
    source.close()
    found = taken(begin(Fleet(), ONE_STEP_OFF, 1, state, load_rollouts(tmp_path)), range(2, 7))
    assert sorted(prompts(found)) == sorted(first(18)[3:])
    assert [versions(rollout) for rollout in found[:3]] == [{0}, {1}, {2}]
    assert "the saved rollout of step 3 is 2 steps stale: it is sampled again" in caplog.text


@pytest.mark.parametrize("staleness", [ONE_STEP_OFF, IN_FLIGHT, PARTIAL])
def test_held_out_problems_get_the_newest_weights(begin, staleness):
    source = begin(Fleet(), staleness)
    before = taken(source, range(1, 3))
    assert versions(source.held_out(2, silent)) == {2}
    assert prompts([*before, *taken(source, range(3, 7))]) == first(18)


def test_a_validation_comes_before_every_step(begin):
    fleet = Fleet()
    source, steps, send = begin(fleet, PARTIAL), [], fleet.replicas[0].send

    async def noted(requests, aborted):
        steps.extend(request.step for request in requests.values())
        await send(requests, aborted)

    taken(source, range(1, 3))
    fleet.replicas[0].send = noted
    validated = source.held_out(2, silent)
    assert steps.count(0) == len(validated.episodes) and all(step == 0 or step > 2 for step in steps)


@pytest.mark.parametrize("staleness", [ONE_STEP_OFF, IN_FLIGHT, PARTIAL])
def test_an_error_reaches_the_step_that_waits(begin, staleness):
    fleet = Fleet()
    source = begin(fleet, staleness)
    source.take(1, silent)
    fleet.replicas[0].error = EngineError("no numbers")
    with pytest.raises(EngineError, match=r"step \d: no numbers"):
        for step in range(2, 5):
            source.publish(step - 1)
            source.take(step, silent)


@pytest.mark.parametrize("staleness", [ONE_STEP_OFF, IN_FLIGHT, PARTIAL])
@pytest.mark.parametrize("seed", range(3))
def test_no_prompt_is_lost_or_trained_twice_when_engines_die_and_runs_resume(tmp_path, begin, staleness, seed):
    """Whatever happens between two steps: engines die, one or all of them, and the run resumes from its checkpoint."""
    chance, fleet = random.Random(seed), Fleet(2, capacity=5)
    source, found, steps = begin(fleet, staleness, steps=15), [], 15
    for step in range(1, steps + 1):
        found.append(source.take(step, silent))
        for replica in fleet.replicas:
            replica.is_dead = chance.random() < 0.4
        source.wait_until_idle(silent)
        if chance.random() < 0.4:
            folder = tmp_path / str(step)
            folder.mkdir()
            state = source.save(folder)
            source.close()
            fleet = Fleet(2, capacity=5)
            source = begin(fleet, staleness, step, state, load_rollouts(folder), steps)
        else:
            source.publish(step)
    assert sorted(prompts(found)) == sorted(first(45))
    assert all(len(rollout.episodes) == 6 for rollout in found)


@pytest.mark.parametrize("seed", range(3))
def test_with_dynamic_sampling_no_prompt_is_trained_twice(tmp_path, begin, seed):
    """Rollouts under way take prompts from the same data, and give back what they do not need."""
    options = {"use_dynamic_sampling": True, "oversample": 2.0, "samples": 2}
    source = begin(Fleet(2), IN_FLIGHT, **options)
    found = taken(source, range(1, 3))
    state = source.save(tmp_path)
    source.close()
    again = begin(Fleet(2), IN_FLIGHT, 2, state, load_rollouts(tmp_path), **options)
    found += taken(again, range(3, 7))
    assert len(prompts(found)) == len(set(prompts(found))) == 18
    assert all(rollout.metrics()["useful_tokens_share"] <= 1 for rollout in found)


def test_replacements_begin_before_prompts_of_later_steps_that_wait(begin, monkeypatch):
    """The engine has room for one step's samples, which all end at the same time; the queue gives it those of step 2
    before step 1 asks for replacements."""
    monkeypatch.setattr("tests.unit.rollout.fleet.length", lambda request: 5)
    begun, fleet = [], Fleet(1, capacity=6)
    work = fleet.replicas[0].work

    def noted(submitted, aborted):
        begun.extend("".join(map(chr, request.prompt))[:-1] for request in submitted.values())
        return work(submitted, aborted)

    fleet.replicas[0].work = noted
    rollout = begin(fleet, IN_FLIGHT, use_dynamic_sampling=True).take(1, silent)
    replacements = [prompt for prompt in asked(rollout) if prompt not in first(3)]
    assert replacements and all(begun.index(prompt) < begun.index("p 6") for prompt in replacements)
    assert begun.index("p 3") < begun.index(replacements[0])


def test_a_prompt_that_rests_is_counted_by_the_step_that_uses_the_next_one(begin):
    """One step off, a rollout does not depend on how many prompts begin in vain, and neither does this number."""
    found = []
    for oversample in (1.0, "auto", 3.0):
        source = begin(Fleet(), use_dynamic_sampling=True, oversample=oversample, epoch=8)
        found.append([(asked(one), one.taught, one.rested) for one in taken(source, range(1, 7))])
    assert found[0] == found[1] == found[2] and sum(rested for _, _, rested in found[0]) > 0


@pytest.mark.parametrize("staleness", [ONE_STEP_OFF, IN_FLIGHT])
@pytest.mark.parametrize("saves_begun", [True, False])
def test_every_place_in_the_data_is_counted_once_whatever_a_resumed_run_samples_again(
    tmp_path, begin, staleness, saves_begun
):
    options = {"use_dynamic_sampling": True, "oversample": 3.0, "epoch": 8, "saves_begun": saves_begun}
    source = begin(Fleet(), staleness, **options)
    found = taken(source, range(1, 4))
    state = source.save(tmp_path)
    source.close()
    saved, given_back = load_rollouts(tmp_path), () if saves_begun else state["ahead"]
    again = begin(Fleet(), staleness, 3, state, saved, given_back=given_back, **options)
    found += taken(again, range(4, 7))
    left = again._sampler.order.state()
    counted = sum(rollout.rested + len(rollout.taught) for rollout in found)
    assert counted == left["position"] - len(left.get("returned", ()))
    assert sum(rollout.rested for rollout in found) > 0


def test_when_all_engines_die_in_a_validation_it_ends_with_new_ones(begin):
    fleet = Fleet(2)
    source = begin(fleet, IN_FLIGHT)
    source.take(1, silent)
    for replica in fleet.replicas:
        replica.is_dead = True
    assert asked(source.held_out(1, silent)) == ["held out 0", "held out 1"] and fleet.refitted == [0, 0]


def test_engines_that_do_nothing_are_named(begin):
    fleet = Fleet(2)
    source = begin(fleet, IN_FLIGHT, stall_s=0.6)
    for replica in fleet.replicas:
        replica.may_work.clear()
    expected = r"no engine worked for 0.6 s .*: engine 0 has \d+ requests, engine 1 has \d+ requests; 0 requests wait"
    with pytest.raises(WorkerError, match=expected):
        for step in range(1, 4):
            source.take(step, silent)


def test_an_environment_that_does_not_answer_is_named(begin, monkeypatch):
    async def play(self, episode, assistant):
        await assistant.respond()
        with episode.waiting("environment"):
            await asyncio.Event().wait()

    monkeypatch.setattr(SingleTurn, "play", play)
    source = begin(Fleet(), stall_s=0.6)
    with pytest.raises(
        WorkerError, match=r"no engine worked for 0.6 s .*; 0 of 3 prompts.* 6 wait for the environment"
    ):
        source.take(1, silent)


def test_how_long_the_engines_waited_is_known(begin):
    source = begin(Fleet(), ONE_STEP_OFF)
    source.take(1, silent)
    time.sleep(0.3)
    source.publish(1)
    assert source.take(2, silent).seconds()["engines_idle"] > 0.1
    assert source.finish_generation() == {"engine/kv_cache": 4.0}
