"""One queue over all engines: even shares, capacity, abort, pause, and engines that die."""

import asyncio
import gc
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from nemo_rl_lite.errors import EngineError, WorkerError
from nemo_rl_lite.generation.interface import Completion, Conversation, EngineLoad, Request, Sampling, Unfinished
from nemo_rl_lite.generation.queue import RequestQueue
from tests.unit.generation.stepped import Stepped

SAMPLING = Sampling(1.0, 1.0, None, 100, (), ())
LOST = WorkerError("generation rank 1", "generate", "the process died", lost=True)


def request(length: int, prompt: int = 0, step: int = 0, **options: bool) -> Request:
    """A response of N tokens; an engine samples one in each exchange."""
    return Request((prompt, length), SAMPLING, length, step, **options)


class Engine(Stepped):
    """Samples one token of each of its requests in a report; fails from the exchange `fails_at` on."""

    def __init__(self, capacity: int, fails_at: int | None = None, error: Exception = LOST):
        super().__init__()
        self.capacity, self.fails_at, self.error = capacity, fails_at, error
        self.held: dict[int, list] = {}
        self.sampled, self.exchanges, self.most, self.aborted, self.prompts = 0, 0, 0, [], []
        # Requests whose new tokens each report has.
        self.telling: set[int] = set()
        self.reported = EngineLoad()

    @property
    def load(self) -> EngineLoad:
        return self.reported

    def work(self, submitted, aborted):
        self.exchanges += 1
        if self.fails_at is not None and self.exchanges >= self.fails_at:
            self.held = {}
            raise self.error
        self.prompts += [one.prompt[0] for one in submitted.values()]
        for number, one in submitted.items():
            begun = 0 if one.begun is None else len(one.begun.tokens)
            self.held[number] = [one.prompt[1] - begun, one.prompt[1]]
        self.telling |= {number for number, one in submitted.items() if one.continues}
        self.most = max(self.most, len(self.held))
        self.aborted += [number for number in aborted if self.held.pop(number, None)]
        self.sampled += len(self.held)
        for left in self.held.values():
            left[0] -= 1
        done = {number: length for number, (left, length) in self.held.items() if not left}
        self.held = {number: own for number, own in self.held.items() if number not in done}
        self.reported = EngineLoad(sum(length - left for left, length in self.held.values()))
        new = {number: Unfinished((0,), (0.0,), "length", (0,)) for number in self.held if number in self.telling}
        return new | {
            number: Completion((0,) * length, (0.0,) * length, "stop", (0,) * length) for number, length in done.items()
        }


def queue(*engines: Engine, restore=None, on_loss=None) -> RequestQueue:
    return RequestQueue(engines, engines[0].capacity, on_loss or (lambda *_: None), restore or (lambda: None))


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until it is so."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def all_work(*engines: Engine) -> None:
    """Return when each engine has a request."""
    await until(lambda: all(engine.held for engine in engines))


@asynccontextmanager
async def paused(requests: RequestQueue):
    """Let all that is asked for in the block begin at its end."""
    await requests.pause()
    yield
    await asyncio.sleep(0)
    requests.resume()


async def sample_all(requests: RequestQueue, lengths: list[int], near: int | None = None) -> list[int]:
    async with paused(requests):
        asked = [
            asyncio.create_task(requests.sample(request(length, place), Conversation(ended=True, engine=near)))
            for place, length in enumerate(lengths)
        ]
    found = await asyncio.gather(*asked)
    assert [len(completion.tokens) for completion, _ in found] == lengths
    return [engine for _, engine in found]


def run(requests: RequestQueue, lengths: list[int], near: int | None = None) -> list[int]:
    """The engine of each response."""

    async def serve() -> list[int]:
        async with requests.serving() as served:
            return await sample_all(served, lengths, near)

    return asyncio.run(serve())


def test_samples_of_a_prompt_spread_over_all_engines():
    """Long answers come from the same prompt; contiguous shares would give them to one engine."""
    engines = [Engine(64) for _ in range(4)]
    lengths = [40] * 8 + [3] * 24
    assert run(queue(*engines), lengths) == [0, 1, 2, 3] * 8
    assert {engine.sampled for engine in engines} == {2 * 40 + 6 * 3}


def test_an_engine_that_is_done_takes_the_next_request_and_none_holds_more_than_its_capacity():
    engines = [Engine(2), Engine(2)]
    run(queue(*engines), [60, 60, 1, 1, 1, 1, 1, 1, 1, 1])
    assert [engine.most for engine in engines] == [2, 2]
    assert sum(engine.sampled for engine in engines) == 128
    # While each samples one long answer, both sample short ones.
    assert max(engine.sampled for engine in engines) <= 66


def test_a_request_goes_to_the_engine_that_knows_its_beginning_while_that_has_room():
    assert run(queue(Engine(2), Engine(2)), [5, 5, 5], near=1) == [1, 1, 0]


@pytest.mark.parametrize("others", [[], [Engine(1, fails_at=2)]])
def test_of_waiting_requests_those_of_the_earliest_step_begin_first(others):
    """Also those of an engine that has died."""
    engine = Engine(1)

    async def serve() -> None:
        async with queue(engine, *others).serving() as requests:
            async with paused(requests):
                steps = enumerate([3, 2, 1, 3, 1])
                asked = [asyncio.create_task(requests.sample(request(20, prompt, step))) for prompt, step in steps]
            await asyncio.gather(*asked)

    asyncio.run(serve())
    assert engine.prompts == [2, 4, 1, 0, 3]


def test_nothing_works_while_paused_and_all_resumes_whole():
    engine = Engine(8)

    async def serve() -> None:
        async with queue(engine).serving() as requests:
            asked = [asyncio.create_task(requests.sample(request(200))) for _ in range(4)]
            await all_work(engine)
            await requests.pause()
            before = engine.exchanges
            await asyncio.sleep(0.02)
            assert engine.exchanges == before > 0 and not any(task.done() for task in asked)
            requests.resume()
            assert [len(completion.tokens) for completion, _ in await asyncio.gather(*asked)] == [200] * 4

    asyncio.run(serve())


def test_a_request_that_nobody_waits_for_is_aborted():
    engine = Engine(2)

    async def serve() -> None:
        async with queue(engine).serving() as requests:
            long = asyncio.create_task(requests.sample(request(10**6)))
            short = [asyncio.create_task(requests.sample(request(3))) for _ in range(3)]
            waiting = asyncio.create_task(requests.sample(request(10**6)))
            await all_work(engine)
            waiting.cancel()
            long.cancel()
            await asyncio.gather(*short)
            await until(lambda: engine.held == {})
            assert engine.aborted == [0]
            # What is left at the end is taken back, too.
            left = asyncio.create_task(requests.sample(request(10**6)))
            await all_work(engine)
        left.cancel()

    asyncio.run(serve())
    assert len(engine.aborted) == 2 and engine.held == {}


def test_the_others_finish_what_a_dead_engine_has_not():
    engines = [Engine(8), Engine(8, fails_at=4)]
    told = []
    lengths = [2, 2, 9, 9, 9, 9]
    assert run(queue(*engines, on_loss=lambda *loss: told.append(loss)), lengths) == [0, 1, 0, 0, 0, 0]
    assert told == [(1, LOST)] and engines[0].sampled == 2 + 4 * 9


@pytest.mark.parametrize("continues", [True, False])
def test_another_engine_continues_the_responses_of_a_dead_one(continues):
    engines = [Engine(8), Engine(8, fails_at=4)]

    async def serve() -> None:
        async with queue(*engines).serving() as requests:
            async with paused(requests):
                near = [Conversation(engine=1) for _ in range(2)]
                asked = [asyncio.create_task(requests.sample(request(9, continues=continues), one)) for one in near]
            found = await asyncio.gather(*asked)
            assert [(len(completion.tokens), engine) for completion, engine in found] == [(9, 0)] * 2
            assert (requests.taken_over, requests.repeated) == ((6, 0) if continues else (0, 6))

    asyncio.run(serve())
    assert (engines[0].sampled, engines[1].sampled) == (12 if continues else 18, 6)


def test_tokens_that_wait_for_an_engine_are_not_taken_over_yet():
    engine, told = Engine(8, fails_at=4), []

    async def serve() -> None:
        own = queue(engine, on_loss=lambda *_: told.append((own.waiting, own.taken_over)))
        async with own.serving() as requests:
            asked = asyncio.create_task(requests.sample(request(9, continues=True)))
            await until(lambda: told)
            assert told == [(3, 0)]
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            assert (requests.waiting, requests.taken_over) == (0, 0)

    asyncio.run(serve())


def test_when_none_is_left_all_come_back_with_their_requests():
    engines, restored = [Engine(8, fails_at=3), Engine(8, fails_at=3)], []

    def restore():
        restored.append(True)
        for engine in engines:
            engine.fails_at = None
        own.replaced([0, 1])

    own = queue(*engines, restore=restore)
    run(own, [5, 5, 5, 5])
    assert restored == [True] and all(engine.sampled for engine in engines)


def test_requests_wait_for_new_engines_when_nobody_brings_them_back_at_once():
    engine = Engine(8, fails_at=3)

    async def serve() -> None:
        async with queue(engine).serving() as requests:
            asked = [asyncio.create_task(requests.sample(request(5))) for _ in range(2)]
            while requests.has_engines:
                await asyncio.sleep(0.001)
            await requests.pause()
            assert requests.describe() == "engine 0 died; 2 requests wait for an engine; the engines are paused"
            engine.fails_at = None
            requests.replaced([0])
            requests.resume()
            assert [len(completion.tokens) for completion, _ in await asyncio.gather(*asked)] == [5, 5]

    asyncio.run(serve())


def test_an_engine_that_is_replaced_while_it_is_paused_gets_its_requests_again():
    """It may die while it gets new weights, when the queue does not look."""
    engines = [Engine(8), Engine(8)]

    async def serve() -> None:
        async with queue(*engines).serving() as requests:
            asked = [asyncio.create_task(requests.sample(request(200))) for _ in range(4)]
            await all_work(*engines)
            await requests.pause()
            assert "engine 1 has 2 requests" in requests.describe()
            engines[1].held = {}
            requests.replaced([1])
            requests.resume()
            assert [len(completion.tokens) for completion, _ in await asyncio.gather(*asked)] == [200] * 4

    asyncio.run(serve())


def test_requests_begin_together_and_others_work_meanwhile():
    engine = Engine(8)

    async def serve() -> None:
        async with queue(engine).serving() as requests:
            earlier = asyncio.create_task(requests.sample(request(200)))
            await all_work(engine)
            with requests.submit_as_batch():
                asked = [asyncio.create_task(requests.sample(request(3))) for _ in range(3)]
                before = engine.exchanges
                await until(lambda: engine.exchanges > before + 5)
                assert len(engine.prompts) == 1
            await asyncio.gather(earlier, *asked)

    asyncio.run(serve())


class Clock:
    """What the stopwatches read; it moves when a test says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("nemo_rl_lite.generation.assignment.time", clock)
    return clock


def test_the_time_without_requests_is_counted(clock):
    engine = Engine(8)

    async def serve() -> None:
        async with queue(engine).serving() as requests:
            await asyncio.sleep(0.001)
            clock.now += 4.0
            assert requests.idle_s == 4.0
            asked = asyncio.create_task(requests.sample(request(1000)))
            await all_work(engine)
            clock.now += 2.0
            assert requests.idle_s == 4.0
            await asked
            assert requests.idle_s == 4.0

    asyncio.run(serve())


def test_a_pause_ends_with_the_error_of_an_engine():
    """Who brings new weights must not wait for an engine that will never stop."""

    async def serve() -> None:
        async with queue(Engine(8, fails_at=2, error=EngineError("not finite"))).serving() as requests:
            asked = asyncio.create_task(requests.sample(request(50)))
            await asyncio.gather(asked, return_exceptions=True)
            with pytest.raises(EngineError, match="not finite"):
                await requests.pause()

    asyncio.run(serve())


@pytest.mark.parametrize(
    "error",
    [
        EngineError("not finite"),
        WorkerError("generation rank 0", "generate", "ValueError: no"),
        LOST,
    ],
)
def test_an_error_reaches_everyone_who_waits_or_asks_later(error, caplog):
    def refuse(replica, lost):
        raise lost

    with pytest.raises(type(error), match=str(error)[-8:]):
        run(queue(Engine(8, fails_at=2, error=error), Engine(8, fails_at=2, error=error), on_loss=refuse), [5, 5, 5])

    async def ask_later() -> None:
        async with queue(Engine(8, fails_at=1, error=error), on_loss=refuse).serving() as requests:
            for _ in range(2):
                with pytest.raises(type(error)):
                    await requests.sample(request(5))

    asyncio.run(ask_later())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_queue_serves_again_after_an_error():
    engine = Engine(8, fails_at=2, error=EngineError("once"))
    requests = queue(engine)
    with pytest.raises(EngineError):
        run(requests, [5, 5])
    engine.fails_at, engine.held = None, {}
    assert run(requests, [4]) == [0]


def test_tokens_of_unfinished_responses_are_known():
    engines = [Engine(4), Engine(4)]

    async def run() -> tuple[int, int]:
        async with queue(*engines).serving() as requests:
            answers = [asyncio.create_task(requests.sample(request(length))) for length in (400, 400, 1)]
            await answers[-1]
            await until(lambda: requests.unfinished_tokens > 0)
            begun = requests.unfinished_tokens
            for answer in answers:
                answer.cancel()
            return begun, sum(engine.sampled for engine in engines) - 1

    begun, sampled = asyncio.run(run())
    assert 0 < begun <= sampled


def test_turns_of_a_conversation_name_the_weights_that_began_its_cache():
    engine, talk = Engine(8), Conversation()
    seen = []
    hand_over = engine.work

    def work(submitted, aborted):
        seen.extend(one.cache_version for one in submitted.values())
        return hand_over(submitted, aborted)

    engine.work = work

    async def serve() -> None:
        async with queue(engine).serving() as requests:
            for _ in range(2):
                await requests.sample(request(3), talk)
            await requests.sample(request(3))

    asyncio.run(serve())
    assert seen == [None, 0, None] and talk.engine == 0


def test_an_engine_with_a_full_cache_takes_no_more_until_it_has_room():
    class Preempts(Engine):
        is_full = True

        @property
        def load(self) -> EngineLoad:
            running = len(self.held)
            return EngineLoad(0, running, 0, 32 * running, min(0.3 * running, 1.0), int(self.is_full and running > 0))

    engine = Preempts(8)

    async def serve() -> None:
        async with queue(engine).serving() as requests:
            begun = [asyncio.create_task(requests.sample(request(30))) for _ in range(2)]
            await all_work(engine)
            later = [asyncio.create_task(requests.sample(request(30))) for _ in range(4)]
            await asyncio.gather(*begun)
            assert engine.most == 2
            engine.is_full = False
            await asyncio.gather(*later)

    asyncio.run(serve())
    assert engine.most > 2
