"""Prompts that taught nothing are left out for some epochs."""

import json

from nemo_rl_lite.data.problems import FileSet, Problem, chat
from nemo_rl_lite.rollout.sampler import PromptCooldown, PromptOrder
from tests.unit.rollout.test_dynamic_sampling import kept, source

ROW = Problem(chat("x"), "1")
EPOCH = 10


def sampled_epochs(resting: PromptCooldown, epochs: range, teaches: set[int]) -> list[int]:
    """The epochs in which a prompt is sampled that teaches something in some of them."""
    found = []
    for epoch in epochs:
        position = EPOCH * epoch + epoch % EPOCH
        if not resting.rests(ROW, position):
            found.append(epoch)
            resting.note(ROW, position, epoch in teaches)
    return found


def test_a_prompt_rests_twice_as_long_each_time_until_it_teaches():
    assert sampled_epochs(PromptCooldown(4, EPOCH), range(20), set()) == [0, 3, 8, 13, 18]
    assert sampled_epochs(PromptCooldown(4, EPOCH), range(14), {8}) == [0, 3, 8, 9, 12]
    assert sampled_epochs(PromptCooldown(0, EPOCH), range(4), set()) == [0, 1, 2, 3]


def test_it_continues_from_what_a_checkpoint_kept():
    before = PromptCooldown(4, EPOCH)
    assert sampled_epochs(before, range(4), set()) == [0, 3]
    kept = json.loads(json.dumps(before.state()))
    again = [PromptCooldown(4, EPOCH, kept, position=4 * EPOCH) for _ in range(2)]
    assert sampled_epochs(again[0], range(4, 20), set()) == [8, 13, 18]
    assert sampled_epochs(again[1], range(4, 10), {8}) == [8, 9]


def test_a_source_passes_over_them_and_says_how_many():
    rows = FileSet(tuple(Problem(chat(text), "1") for text in ("m a", "x b", "m c", "m d", "x e", "m f")), 0, False)
    own, engine = source([], resting=PromptCooldown(1, 6), oversample=1.0)
    own.order._training = rows
    assert kept(own.rollout(1)) == ["m a", "m c", "m d"] and own.order.state()["position"] == 4
    first = own.rollout(2)
    assert kept(first) == ["m f", "m a", "m c"] and own.order.state()["position"] == 9
    # In the first epoch both `x` were sampled; in the second `x b` is passed over.
    assert first.metrics()["rested_prompts"] == 1 and first.metrics()["filtered_prompts"] == 1
    begun = len(engine.begun)
    rest = own.rollout(3)
    assert kept(rest) == ["m d", "m f", "m a"] and not any("x" in text for text in engine.begun[begun:])
    assert rest.metrics()["rested_prompts"] == 1 and rest.metrics()["useful_tokens_share"] == 1
    # In the third epoch both are tried again.
    again = own.rollout(4)
    assert kept(again) == ["m c", "m d", "m f"] and again.metrics()["filtered_prompts"] == 2
    assert own.order.state()["position"] == 18 and len(own.order.state()["resting"]["rests"]) == 2


def test_those_that_a_step_passed_over_are_counted_alike_however_many_prompts_begin_in_vain():
    """Each step resumes from what the one before it left."""
    rows = FileSet(tuple(Problem(chat(text), "1") for text in ("m a", "x b", "x c", "m d", "x e", "m f")), 0, False)
    found = []
    for oversample in (1.0, "auto", 4.0):
        steps, state = [], {"position": 0, "resting": {}}
        for step in range(1, 9):
            resting = PromptCooldown(4, 6, state["resting"], state["position"])
            own, _ = source([], oversample=oversample)
            own.order = PromptOrder(rows, resting, state)
            rollout = own.rollout(step)
            state = json.loads(json.dumps(own.order.state()))
            steps.append((rollout.rested, kept(rollout), rollout.taught, state))
        found.append(steps)
    assert found[0] == found[1] == found[2]
    assert [rested for rested, *_ in found[0]] == [0, 3, 3, 0, 3, 3, 3, 3]


def test_prompts_rest_without_dynamic_sampling_too():
    own, _ = source([], resting=PromptCooldown(1, 4), use_dynamic_sampling=False)
    own.order._training = FileSet(tuple(Problem(chat(text), "1") for text in ("m a", "x b", "m c", "m d")), 0, False)
    assert [kept(own.rollout(step)) for step in (1, 2)] == [["m a", "x b", "m c"], ["m d", "m a", "m c"]]
