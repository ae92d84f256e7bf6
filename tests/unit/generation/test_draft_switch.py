"""The switch that pauses drafts, on scripted steps; vLLM itself is not needed."""

from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from nemo_rl_lite.generation.interface import Drafts
from nemo_rl_lite.generation.vllm.switch import REST, SETTLE, TURN, WINDOW, DecodeStep, Drafting, DraftSwitch

# Seconds and tokens of a request in a step, with drafts and without.
Speeds = dict[bool, tuple[float, int]]
SLOWER: Speeds = {True: (3.0, 2), False: (1.0, 1)}
FASTER: Speeds = {True: (1.5, 2), False: (1.0, 1)}
# Steps of a measurement at the start, and of a later one: the state changes after each turn.
TURNS = 2 * WINDOW // TURN
MEASURE = 2 * WINDOW + TURNS * SETTLE
AGAIN = 2 * WINDOW + (TURNS - 1) * SETTLE


def run(switch: DraftSwitch, speeds: Speeds, loads: Iterable[int]) -> list[float]:
    """Observe a step for each number of running requests; return the gains."""
    gains = []
    for requests in loads:
        seconds, tokens = speeds[switch.drafts]
        gain = switch.observe(DecodeStep(seconds, requests, requests * tokens))
        gains += [] if gain is None else [gain]
    return gains


@pytest.mark.parametrize(("speeds", "gain"), [(SLOWER, 2 / 3), (FASTER, 4 / 3)])
def test_drafts_continue_only_where_they_make_decoding_faster(speeds, gain, caplog):
    switch = DraftSwitch()
    with caplog.at_level("INFO"):
        assert run(switch, speeds, [64] * (MEASURE - 1)) == []
        assert run(switch, speeds, [64]) == [pytest.approx(gain)]
    line = "drafts pause: 0.67 times the tokens per second without them (running requests: about 64)"
    assert [record.getMessage() for record in caplog.records] == ([line] if gain < 1 else [])
    # Nothing is measured until REST steps have passed at this load.
    states = []
    for _ in range(REST):
        assert run(switch, speeds, [64]) == []
        states.append(switch.drafts)
    assert set(states[:-1]) == {gain > 1}
    assert run(switch, speeds, [64] * (AGAIN + 2 * SETTLE)) == [pytest.approx(gain)]


def test_each_load_has_its_decision():
    """At the tail of a rollout drafts pay, and in the next rollout with many requests they pause at once."""
    switch = DraftSwitch()
    run(switch, SLOWER, [64] * MEASURE)
    assert not switch.drafts
    (gain,) = run(switch, FASTER, [2] * (MEASURE + SETTLE))
    assert switch.drafts and gain == pytest.approx(4 / 3)
    run(switch, SLOWER, [100])
    assert not switch.drafts
    run(switch, FASTER, [3])
    assert switch.drafts


def test_a_measurement_continues_in_the_next_rollout():
    """Rollouts of a few steps are measured too."""
    switch, gains = DraftSwitch(), []
    for _ in range(MEASURE):
        gains += run(switch, SLOWER, [64, 64, 64, 64, 64, 64, 20, 5])
    assert gains[0] == pytest.approx(2 / 3)
    run(switch, SLOWER, [64])
    assert not switch.drafts


def test_one_slow_step_decides_nothing():
    switch = DraftSwitch()
    run(switch, FASTER, [64] * SETTLE)
    switch.observe(DecodeStep(1000.0, 64, 128))
    assert run(switch, FASTER, [64] * (MEASURE - SETTLE - 1)) == [pytest.approx(4 / 3)]


class Engine:
    """The parts of vLLM's engine that `Drafting` uses."""

    def __init__(self):
        self.scheduler = SimpleNamespace(dynamic_sd_lookup=None, max_num_running_reqs=3)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.calls = []

    def collective_rpc(self, name, args):
        self.calls.append((name, *args))


@pytest.mark.parametrize("has_model", [True, False])
def test_a_paused_engine_schedules_no_drafts_and_counts_its_steps(has_model):
    engine = Engine()
    drafting = Drafting(engine, has_model, pauses=True)
    verified = SimpleNamespace(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)

    def count(steps, statistics=None, decodes=True):
        found = Drafts()
        for _ in range(steps):
            seconds, tokens = SLOWER[engine.scheduler.dynamic_sd_lookup is None]
            given = SimpleNamespace(spec_decoding_stats=statistics)
            found += drafting.count(DecodeStep(seconds, 2, 2 * tokens), decodes, given)
        return found

    # Steps with prompts are counted, but not measured.
    assert count(5, verified, decodes=False) == Drafts(10, 30, 15, steps=5)
    assert count(SETTLE + TURN, verified).paused == 0 and engine.scheduler.dynamic_sd_lookup == [0, 0, 0, 0]
    assert engine.calls == ([("shorten_drafts", True)] if has_model else [])
    found = count(SETTLE + TURN)
    assert found.paused == SETTLE + TURN and engine.scheduler.dynamic_sd_lookup is None
    found += count(MEASURE - 2 * (SETTLE + TURN))
    assert (found.measured, found.gains) == (1, pytest.approx(2 / 3))
    assert engine.scheduler.dynamic_sd_lookup == [0, 0, 0, 0]
    assert found.metrics()["speculation_gain"] == pytest.approx(2 / 3)


def test_drafts_do_not_pause_where_seeds_are_to_repeat_responses():
    drafting, found = Drafting(Engine(), has_model=True, pauses=False), Drafts()
    for _ in range(MEASURE):
        found += drafting.count(DecodeStep(1.0, 2, 2), True, None)
    assert found == Drafts(steps=MEASURE)
