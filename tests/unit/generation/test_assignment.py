"""Places, order and capacity of requests: single steps, and rollouts on engines that preempt in virtual time."""

from dataclasses import replace
from types import ModuleType

import admission
import pytest

from nemo_rl_lite.generation.assignment import Assignment, PendingRequest
from nemo_rl_lite.generation.interface import Completion, Conversation, EngineLoad, Request, Sampling

SAMPLING = Sampling(1.0, 1.0, None, 100, (), ())


class Queue:
    """An assignment of requests to engines that share a clock."""

    def __init__(self, engines: int = 1, most: int = 4, share: int | None = None):
        self.now, self.asked = 0.0, 0
        self.assignment = Assignment(engines, most, lambda: self.now, share)

    def ask(self, prompt: int, conversation: Conversation | None = None, step: int = 0, tokens: int = 10) -> None:
        conversation = conversation or Conversation(ended=True)
        request = conversation.begin_turn(Request((prompt,) * tokens, SAMPLING, 0, step))
        self.assignment.add(PendingRequest(self.asked, request, None, conversation))  # pyrefly: ignore
        self.asked += 1

    def given(self, engine: int = 0) -> list[int]:
        """The prompts of the requests that an engine gets next."""
        self.assignment.assign()
        return [request.prompt[0] for request in self.assignment.held[engine].hand_over()[0].values()]

    def finish(self, number: int, length: int, engine: int = 0) -> None:
        self.assignment.finish(engine, number, Completion((0,) * length, (), "stop", (0,) * length))

    def is_full_of(self, running: int, tokens: int, engine: int = 0) -> None:
        """The engine preempts while it runs `running` requests."""
        self.assignment.observe(engine, EngineLoad(0, running, 1, running * tokens, 0.8, 1))


def test_requests_that_all_fit_keep_their_order():
    queue = Queue(most=8)
    queue.ask(1)
    queue.given()
    queue.finish(0, 90)
    for prompt, step in [(2, 1), (1, 1), (3, 0), (1, 0)]:
        queue.ask(prompt, step=step)
    assert queue.given() == [3, 1, 2, 1]


def test_samples_of_a_long_prompt_share_an_engine_up_to_eight_requests_more_than_another_has():
    queue = Queue(engines=3, most=40)
    for prompt in (1, 2, 3, 4):
        for _ in range(8):
            queue.ask(prompt, tokens=512)
    assert [queue.given(engine) for engine in range(3)] == [[1] * 8 + [4] * 8, [2] * 8, [3] * 8]
    for _ in range(16):
        queue.ask(5, tokens=512)
    assert [len(queue.given(engine)) for engine in range(3)] == [0, 8, 8]


def test_samples_of_a_short_prompt_spread_over_the_engines():
    queue = Queue(engines=2, most=40)
    for prompt in (1, 1, 1, 1):
        queue.ask(prompt, tokens=511)
    assert [queue.given(engine) for engine in range(2)] == [[1, 1], [1, 1]]


def test_an_engine_without_room_leaves_samples_of_a_long_prompt_to_others():
    queue = Queue(engines=2, most=3)
    for _ in range(5):
        queue.ask(1, tokens=512)
    assert [len(queue.given(engine)) for engine in range(2)] == [3, 2]


def test_of_more_requests_the_longest_of_the_earliest_step_start_first():
    queue = Queue(most=2)
    for number, length in enumerate((10, 90, 50)):
        queue.ask(number)
        queue.given()
        queue.finish(number, length)
    for prompt, step in [(0, 0), (1, 1), (1, 0), (2, 0), (7, 0)]:
        queue.ask(prompt, step=step)
    # Nothing is known of prompt 7, so it counts as the mean.
    seen = []
    for _ in range(5):
        seen += queue.given()
        queue.finish(queue.assignment.held[0].unfinished[0], 1)
    assert seen == [1, 2, 7, 0, 1]


def test_an_engine_with_its_share_begins_nothing_to_train_on_but_continues_it_and_validates():
    queue, talk = Queue(engines=2, most=4, share=1), Conversation()
    queue.ask(1, talk, step=1)
    assert queue.given() == [1]
    queue.finish(0, 5)
    for prompt in (2, 3, 4):
        queue.ask(prompt, step=1)
    assert [*queue.given(), *queue.given(1)] == [2, 3]
    queue.ask(1, talk, step=1)
    queue.ask(5)
    assert queue.given() == [5, 1] and not queue.given(1)


def test_a_conversation_keeps_its_place_in_a_full_cache_and_its_weights():
    queue, talk = Queue(most=4), Conversation()
    queue.ask(1, talk)
    queue.ask(2)
    queue.given()
    queue.is_full_of(2, 1000)
    queue.ask(3)
    assert queue.given() == []
    queue.finish(0, 20)
    assert talk.engine == 0 and talk.cache_version == 0 and talk.tokens == 30
    # A place is free, but it is the conversation's.
    queue.is_full_of(1, 1000)
    assert queue.given() == []
    queue.ask(1, talk, tokens=40)
    assert queue.given() == [1]
    talk.ended = True
    queue.finish(3, 20)
    queue.is_full_of(1, 1000)
    # The next request gets the place of a conversation that has ended, when the cache has room.
    assert queue.given() == []
    queue.assignment.observe(0, EngineLoad(0, 1, 0, 1000, 0.4, 0))
    assert queue.given() == [3]


def test_a_conversation_whose_environment_takes_long_loses_its_place():
    queue, talk = Queue(most=4), Conversation()
    queue.ask(1, talk)
    queue.ask(2)
    queue.given()
    queue.is_full_of(2, 1000)
    queue.finish(0, 20)
    queue.ask(3)
    queue.now = 14.0
    queue.is_full_of(1, 1000)
    assert queue.given() == [] and queue.assignment.held[0].between_turns == {talk}
    queue.now = 16.0
    queue.is_full_of(1, 1000)
    assert queue.assignment.held[0].between_turns == set()
    # It waits for a place, before all that have not begun.
    queue.ask(1, talk)
    assert queue.given() == []
    queue.finish(1, 10)
    assert queue.given() == [1]


def test_requests_keep_their_order_where_environments_are_too_slow_to_keep_prefixes():
    queue = Queue(most=2)
    for number, length in enumerate((10, 90)):
        queue.ask(number)
        queue.given()
        queue.finish(number, length)
    for _ in range(200):
        talk = Conversation()
        talk.add_turn(Request((9,), SAMPLING, 0), Completion((0,), (), "stop", (0,)), 0)
        talk.turn_ended_s = queue.now - 60
        queue.ask(9, talk)
        queue.given()
        queue.finish(queue.asked - 1, 1)
    for prompt in (0, 1, 0, 1):
        queue.ask(prompt)
    assert queue.given() == [0, 1]


def test_an_idle_engine_always_takes_a_request():
    queue, talk = Queue(most=4), Conversation()
    queue.ask(1, talk)
    queue.given()
    queue.is_full_of(1, 1000)
    queue.finish(0, 5)
    queue.ask(2)
    assert queue.given() == [2]


def test_requests_go_to_an_engine_whose_cache_has_room():
    queue = Queue(engines=2, most=8)
    for prompt in range(4):
        queue.ask(prompt)
    assert queue.given() == [0, 2] and queue.given(1) == [1, 3]
    queue.is_full_of(2, 1000)
    for prompt in range(4):
        queue.ask(prompt)
    assert queue.given() == [] and queue.given(1) == [0, 1, 2, 3]


def test_a_request_that_returns_to_an_engine_is_not_aborted_with_its_earlier_number():
    """It moves to a new engine, which is lost before the first has heard of the abort."""
    queue = Queue(engines=2)
    queue.assignment.lose(0)
    for prompt in (1, 2):
        queue.ask(prompt)
    assert queue.given(1) == [1, 2]
    queue.assignment.replace(0)
    queue.assignment.lose(0)
    queue.assignment.assign()
    new, aborted = queue.assignment.held[1].hand_over()
    assert [request.prompt[0] for request in new.values()] == [2] and aborted == [1] and not {*new} & {*aborted}


def talking(queue: Queue, conversations: list[Conversation]) -> list[int]:
    """The engines of conversations, of which each takes one turn and then waits for its environment."""
    for number, talk in enumerate(conversations):
        queue.ask(number, talk)
        for engine in queue.assignment.alive:
            for _ in queue.given(engine):
                queue.finish(queue.asked - 1, 1, engine)
    return [talk.engine for talk in conversations]  # pyrefly: ignore


def test_conversations_move_to_a_new_engine_with_far_fewer_and_stay_there():
    queue, talks = Queue(engines=2, most=64), [Conversation() for _ in range(40)]
    queue.assignment.lose(1)
    assert talking(queue, talks) == [0] * 40
    queue.assignment.replace(1)
    engines = talking(queue, talks)
    # 29 = 2 * 11 + 7.
    assert engines == [1] * 11 + [0] * 29
    assert talking(queue, talks) == engines
    # Conversations that have ended do not count, and a few are not worth it.
    for talk in talks[3:]:
        talk.ended = True
    assert talking(queue, talks[:3]) == [1] * 3
    queue = Queue(engines=2, most=64)
    queue.assignment.lose(1)
    talking(queue, talks := [Conversation() for _ in range(8)])
    queue.assignment.replace(1)
    assert talking(queue, talks) == [0] * 8


def test_conversations_do_not_move_to_an_engine_without_room():
    queue, talks = Queue(engines=2, most=16), [Conversation() for _ in range(16)]
    queue.assignment.lose(1)
    talking(queue, talks)
    queue.assignment.replace(1)
    queue.ask(1)
    queue.ask(2)
    assert queue.given(0) == [1] and queue.given(1) == [2]
    queue.finish(16, 1)
    queue.is_full_of(1, 1000, engine=1)
    assert talking(queue, talks) == [0] * 16


@pytest.fixture
def bench(monkeypatch) -> ModuleType:
    """The simulation of scripts/bench/admission.py, for engines of at most 16 requests."""
    monkeypatch.setattr(admission, "MOST", 16)
    return admission


def measured(bench: ModuleType, name: str, cache: int, way: str, **own) -> dict[str, float]:
    """Sums of the second step of a task, with its seconds."""
    task = next(one for one in bench.TASKS if one.name == name)
    rollouts = bench.Rollouts(replace(task, **own), bench.WAYS[way], 1, cache)
    rollouts.step(0)
    before = bench._sums(rollouts)
    found = {"seconds": rollouts.step(1)}
    names = ("decoded", "again", "preempted")
    return found | {name: now - then for name, now, then in zip(names, bench._sums(rollouts), before, strict=False)}


def test_long_responses_are_preempted_less_and_are_not_slower(bench):
    size = {"prompts": 8, "samples": 4, "response": 900, "longest": 3_000}
    alone, own = (measured(bench, "32k responses", 8_000, way, **size) for way in ("vLLM alone", "default"))
    assert own["decoded"] == alone["decoded"] > 0
    assert alone["preempted"] > 30 and own["preempted"] < alone["preempted"] / 2
    assert own["seconds"] < 1.02 * alone["seconds"]


def test_short_responses_are_faster_with_the_longest_first(bench):
    size = {"prompts": 16, "samples": 4}
    ways = ("vLLM alone", "watermark, longest first", "default")
    alone, ordered, own = (measured(bench, "short responses", 100_000, way, **size)["seconds"] for way in ways)
    assert own == ordered < 0.97 * alone


def test_conversations_keep_their_prefixes(bench):
    size = {"prompts": 6, "samples": 4, "turns": 20}
    alone, own = (measured(bench, "40 turns, fast tools", 60_000, way, **size) for way in ("vLLM alone", "default"))
    assert own["again"] < alone["again"] / 2 and own["seconds"] < 0.8 * alone["seconds"]
