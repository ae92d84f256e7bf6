"""The switch that pauses drafts, on scripted steps; vLLM itself is not needed."""

from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from nemo_rl_lite.generation.interface import Drafts
from nemo_rl_lite.generation.vllm.switch import REST, SETTLE, WINDOW, DecodeStep, Drafting, DraftSwitch

# Seconds and tokens of a request in a step, with drafts and without.
Speeds = dict[bool, tuple[float, int]]
SLOWER: Speeds = {True: (3.0, 2), False: (1.0, 1)}
FASTER: Speeds = {True: (1.5, 2), False: (1.0, 1)}
# Until the end of the first measurement.
MEASURE = SETTLE + WINDOW + SETTLE + WINDOW


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
        assert run(switch, speeds, [64] * MEASURE) == [pytest.approx(gain)]
    assert switch.drafts == (gain > 1)
    assert [record.getMessage() for record in caplog.records] == (
        ["drafts pause: 0.67 times the tokens per second without them, at 64 requests"] if gain < 1 else []
    )
    # At this load nothing is measured until REST steps have passed.
    assert run(switch, speeds, [64] * REST) == []
    assert run(switch, speeds, [64] * (2 * WINDOW + 2 * SETTLE)) == [pytest.approx(gain)]


def test_drafts_resume_once_few_requests_are_left(caplog):
    switch = DraftSwitch()
    run(switch, SLOWER, [64] * MEASURE)
    assert not switch.drafts
    # Fewer, but not half of them.
    assert run(switch, FASTER, [33] * WINDOW) == [] and not switch.drafts
    with caplog.at_level("INFO"):
        (gain,) = run(switch, FASTER, [32] * (2 * WINDOW + 2 * SETTLE))
    assert switch.drafts and gain == pytest.approx(4 / 3)
    assert "drafts resume: 1.33 times" in caplog.text


def test_a_load_that_changes_within_a_measurement_decides_nothing():
    """Fewer requests make steps faster, whatever drafts do."""
    switch = DraftSwitch()
    assert run(switch, SLOWER, [64] * (SETTLE + WINDOW)) == [] and not switch.drafts
    assert run(switch, SLOWER, [8] * (SETTLE + WINDOW)) == [] and switch.drafts
    assert run(switch, SLOWER, [8] * MEASURE) == [pytest.approx(2 / 3)]


def test_one_slow_step_decides_nothing():
    switch = DraftSwitch()
    run(switch, FASTER, [64] * SETTLE)
    switch.observe(DecodeStep(1000.0, 64, 128))
    run(switch, FASTER, [64] * (MEASURE - SETTLE - 1))
    assert switch.drafts


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
    assert count(SETTLE + WINDOW, verified).paused == 0 and engine.scheduler.dynamic_sd_lookup == [0, 0, 0, 0]
    found = count(SETTLE + WINDOW)
    assert (found.paused, found.measured, found.gains) == (SETTLE + WINDOW, 1, pytest.approx(2 / 3))
    assert engine.calls == ([("shorten_drafts", True)] if has_model else [])
    assert found.metrics() == {"speculation_paused": 1.0, "speculation_gain": pytest.approx(2 / 3)}


def test_drafts_do_not_pause_where_seeds_are_to_repeat_responses():
    drafting, found = Drafting(Engine(), has_model=True, pauses=False), Drafts()
    for _ in range(MEASURE):
        found += drafting.count(DecodeStep(1.0, 2, 2), True, None)
    assert found == Drafts(steps=MEASURE)
