"""What engines, environments and rewards did in one rollout."""

from itertools import pairwise

from nemo_rl_lite.report.record import EPISODES, ROLLOUT_PARTS, timeline


def span(what: str, begin: float, end: float, place: int = 0) -> dict:
    return {"what": what, "begin": begin, "end": end, "place": place}


def test_lanes_count_what_is_under_way():
    rows = [
        {"step": 7, "spans": [span("generate", 0.0, 4.0, 1), span("reward", 4.0, 8.0)]},
        {
            "step": 7,
            "spans": [span("generate", 0.0, 2.0, 0), span("environment", 2.0, 4.0), span("generate", 4.0, 6.0)],
        },
        {"step": 7, "spans": [span("generate", 0.0, 2.0, 0)]},
    ]
    found = timeline(rows)
    assert (found["step"], found["seconds"], found["count"]) == (7, 8.0, 3)
    assert list(found["lanes"]) == ["engine 0", "engine 1", "environment", "reward"]
    quarter = ROLLOUT_PARTS // 4
    in_quarters = {name: [counts[place * quarter] for place in range(4)] for name, counts in found["lanes"].items()}
    assert in_quarters == {
        "engine 0": [2, 0, 1, 0],
        "engine 1": [1, 1, 0, 0],
        "environment": [0, 1, 0, 0],
        "reward": [0, 0, 1, 1],
    }
    # What is counted is the time of all, whatever the parts.
    assert abs(sum(found["lanes"]["engine 0"]) * 8 / ROLLOUT_PARTS - 6) < 0.01
    assert found["episodes"][0] == [["generate", 0.0, 4.0, 1], ["reward", 4.0, 8.0, 0]]


def test_many_episodes_are_thinned_evenly():
    found = timeline([{"step": 1, "spans": [span("generate", 0.0, 1.0 + place)]} for place in range(3 * EPISODES)])
    assert len(found["episodes"]) == EPISODES and found["count"] == 3 * EPISODES
    assert {after[0][2] - before[0][2] for before, after in pairwise(found["episodes"])} == {3.0}
