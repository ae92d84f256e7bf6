"""Agents may change their histories: each sampled token is trained once, in the sequence in which it was sampled."""

import asyncio
import dataclasses
import random
from collections import Counter

import numpy as np
import pytest

from nemo_rl_lite.losses.batch import TokenRows
from nemo_rl_lite.rollout.episode import EpisodeRecord
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.saved import load_groups, save_groups
from nemo_rl_lite.rollout.store import RolloutFiles, read_rollout, rollout_files
from tests.unit.rollout.histories import FIRST, Engine, Numbers, ask, begun, logprob_of, user, wandered

TOOL = {"type": "function", "function": {"name": "look"}}


def played(agent, seed: int = 0):
    """The episode and the engine of an agent, a coroutine function of its assistant."""
    engine = Engine(random.Random(seed))
    episode, assistant = begun(engine)
    asyncio.run(agent(assistant))
    return episode, engine


def sampled(segment) -> list[list[int]]:
    return [turn.tokens.tolist() for _, turn in segment.turns]


@pytest.mark.parametrize("seed", range(60))
def test_each_sampled_token_is_trained_once_where_it_was_sampled(seed):
    episode, engine = wandered(seed)
    rows = Rollout([episode], 1, 0).rows([0.5], 3)
    trained = [token for row in rows for token in row.tokens[row.mask].tolist()]
    assert sorted(trained) == list(range(FIRST, engine.next))
    assert rows.episodes is None or set(rows.episodes.tolist()) == {0}
    for row in rows:
        own = row.tokens[row.mask]
        assert row.generation_logprobs[row.mask].tolist() == [np.float32(logprob_of(token)) for token in own.tolist()]
        assert not row.generation_logprobs[~row.mask].any() and (row.ages == 3 * row.mask).all()
        assert row.advantage == 0.5 and row.reward == episode.reward
    for segment in episode.segments:
        for start, turn in segment.turns:
            # The engine has read what the row has before the turn.
            assert engine.prompts[turn.tokens[0]] == tuple(segment.tokens[:start])
    assert len(set(engine.seeds)) == len(engine.seeds) == episode.turn_count
    assert all(segment.history.conversation.ended for segment in episode.segments)


@pytest.mark.parametrize("seed", range(20))
def test_messages_that_a_segment_has_keep_their_tokens(seed):
    """Each message of a segment is there as it was sampled, or as the tokenizer writes it."""
    episode, _ = wandered(seed)
    texts = {Numbers().text(turn.tokens): turn.tokens.tolist() for one in episode.segments for _, turn in one.turns}
    kept = 0
    for segment in episode.segments:
        messages, tokens, place = [*segment.prompt, *segment.said], segment.tokens, 0
        for message in messages:
            own = texts.get(message["content"], [])
            if own and tokens[place : place + len(own)] == own:
                kept, place = kept + 1, place + len(own)
            else:
                written = Numbers().message(message)
                assert tokens[place : place + len(written)] == written
                place += len(written)
        assert place == len(tokens)
    assert kept >= len(texts)


def test_a_compacted_history_begins_a_segment():
    async def agent(assistant):
        _, history = await ask(assistant, [user("go")])
        segment, history = await ask(assistant, [*history, user("on")])
        assert segment is assistant.episode
        segment, history = await ask(assistant, [user("go"), user("sum")])
        assert segment is assistant.episode.branches[0]
        again, _ = await ask(assistant, [*history, user("on")])
        assert again is segment

    episode, _ = played(agent)
    assert [len(one.turns) for one in episode.segments] == [2, 2] and episode.turn_count == 4
    assert episode.response == episode.branches[0].said[-1]["content"] and episode.last is episode.branches[0]
    assert episode.branches[0].prompt == (user("go"), user("sum"))
    assert episode.branches[0].history.conversation is not episode.history.conversation


def test_a_branch_keeps_the_tokens_of_what_it_shares():
    async def agent(assistant):
        _, history = await ask(assistant, [user("go")])
        await ask(assistant, [*history, user("left")])
        _, other = await ask(assistant, [*history, user("right")])
        changed = [*other[:-1], {"role": "assistant", "content": "short"}, user("more")]
        await ask(assistant, changed)

    episode, _ = played(agent)
    first, second, third = episode.segments
    shared = first.tokens[: first.prompt_length + len(sampled(first)[0])]
    right = [*shared, *Numbers().message(user("right"))]
    assert second.tokens == [*right, *sampled(second)[0]] and second.prompt_length == len(right)
    tail = Numbers().prompt([user("right"), {"role": "assistant", "content": "short"}, user("more")])
    assert third.tokens == [*shared, *tail, *sampled(third)[0]]


def test_a_branch_asks_the_engine_of_what_it_shares():
    async def agent(assistant):
        _, history = await ask(assistant, [user("go")])
        assistant.episode.history.conversation.engine, assistant.episode.history.conversation.cache_version = 5, 2
        start = assistant.episode.start_of([*history, user("on")])
        branch = start.branch([1], [*history, user("on")], (), 1)
        own = branch.history.conversation
        assert (own.engine, own.cache_version, own.tokens) == (5, 2, 0) and branch.history.ends == [(2, start.length)]

    played(agent)


def test_other_tools_begin_a_segment_without_known_tokens():
    async def agent(assistant):
        _, history = await ask(assistant, [user("go")])
        segment, history = await ask(assistant, [*history, user("on")], [TOOL])
        again, _ = await ask(assistant, [*history, user("on")], [TOOL])
        assert segment is again is assistant.episode.branches[0]

    episode, _ = played(agent)
    assert [one.tools for one in episode.segments] == [(), (TOOL,)]
    assert episode.branches[0].tokens[: episode.branches[0].prompt_length][-4:] == Numbers().message(user("on"))
    assert max(episode.branches[0].tokens[: episode.branches[0].prompt_length]) < FIRST


def test_requests_at_the_same_time_have_segments_of_their_own():
    async def agent(assistant):
        _, history = await ask(assistant, [user("go")])
        await asyncio.gather(*(ask(assistant, [*history, user("same")]) for _ in range(3)))

    episode, engine = played(agent)
    assert [len(one.turns) for one in episode.segments] == [2, 1, 1]
    assert len(set(engine.seeds)) == 4 and {one.prompt_length for one in episode.branches} == {
        len(episode.tokens) - len(sampled(episode)[1])
    }


def test_an_engine_without_an_answer_changes_no_segment():
    async def agent(assistant):
        _, history = await ask(assistant, [user("go")])
        sample, assistant.requests.sample = assistant.requests.sample, None
        for messages in ([*history, user("on")], [user("new")]):
            with pytest.raises(TypeError):
                await ask(assistant, messages)
        assistant.requests.sample = sample
        segment, _ = await ask(assistant, [*history, user("on")])
        assert segment is assistant.episode

    episode, _ = played(agent)
    assert len(episode.segments) == 2 and episode.row_segments == [episode]
    assert len(Rollout([episode], 1, 0).rows([1.0], 0)) == 1


def three_episodes() -> Rollout:
    """An episode with several rows between two with one."""
    several = next(one for one, _ in map(wandered, range(99)) if one.row_count > 2)

    async def once(assistant):
        await ask(assistant, [user("go")])

    alone, other = played(once)[0], played(once, 1)[0]
    alone.reward, other.reward = 0.0, 1.0
    return Rollout([alone, several, other], 1, 0)


def test_rows_name_their_episodes():
    rollout = three_episodes()
    count = rollout.episodes[1].row_count
    rows = rollout.rows([0.1, 0.2, 0.3], 0)
    assert rows.episodes.tolist() == [0, *[1] * count, 2]
    assert rows.advantages.tolist() == [0.1, *[0.2] * count, 0.3]
    assert Rollout([rollout.episodes[0]], 1, 0).rows([1.0], 0).episodes is None


def test_metrics_count_episodes():
    rollout = three_episodes()
    metrics, several = rollout.metrics(), rollout.episodes[1]
    assert metrics["num_valid_samples"] == 3 and metrics["max_segments_per_sample"] == several.row_count
    assert metrics["avg_segments_per_sample"] == pytest.approx((2 + several.row_count) / 3)
    rows = rollout.rows([0.0] * 3, 0)
    assert metrics["total_num_tokens"] == len(rows.tokens) and metrics["global_valid_toks"] == rows.mask.sum()
    of_parts = ("mean_prompt_length", "mean_env_tokens_per_sample", "mean_gen_tokens_per_sample")
    assert sum(metrics[name] for name in of_parts) == pytest.approx(metrics["mean_total_tokens_per_sample"])
    assert several.versions == Counter({0: several.generated})


def test_a_record_has_the_counts_of_its_episode():
    for episode in three_episodes().episodes:
        record = EpisodeRecord.of(episode, 0, 7)
        for name in ("length", "row_count", "versions", "prompt_tokens", "generated", "turn_count"):
            assert getattr(record, name) == getattr(episode, name), name
        rows = TokenRows.of([episode.row(1.0, 0, None, number) for number in range(episode.row_count)])
        assert [one.length for one in record.rows] == rows.lengths.tolist()
        assert [sum(one.versions.values()) for one in record.rows] == rows.trained.tolist()


def test_a_saved_rollout_has_all_segments(tmp_path):
    rollout = three_episodes()
    rollout.turn_discount = 0.5
    for episode in rollout.episodes:
        episode.spans = []
        episode.turn_rewards = [0.25 * turn for turn in range(episode.turn_count)]
    save_groups(tmp_path / "groups.parquet", {3: list(rollout.episodes)})
    found = load_groups(tmp_path / "groups.parquet")[3].read()
    assert found == rollout.episodes
    before, after = rollout.rows([0.5] * 3, 9), dataclasses.replace(rollout, episodes=found).rows([0.5] * 3, 9)
    for name in ("tokens", "mask", "ages", "generation_logprobs", "episodes"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name
    assert found[1].response == rollout.episodes[1].response


def test_a_sample_in_a_file_has_all_rows(tmp_path):
    rollout = three_episodes()
    several, rows = rollout.episodes[1], rollout.rows([0.0] * 3, 0)
    RolloutFiles(tmp_path, None, done=0).write(1, "train", rollout)
    alone, row, _ = read_rollout(rollout_files(tmp_path)[0], tokens=True)
    assert alone["segments"] is None and alone["token_ids"] == rows[0].tokens.tolist()
    own = rows[1:-1]
    assert row["token_ids"] == own.tokens.tolist()
    assert row["generation_logprobs"] == own.generation_logprobs.tolist()
    places = [place for run in row["versions"] for place in range(run["start"], run["start"] + run["length"])]
    assert places == np.flatnonzero(own.mask).tolist()
    assert [(one["start"], one["length"]) for one in row["segments"]] == list(
        zip((own.ends - own.lengths).tolist(), own.lengths.tolist(), strict=True)
    )
    for one, segment in zip(row["segments"], several.row_segments, strict=True):
        assert one["prompt_tokens"] == segment.prompt_length
        assert [message["content"] for message in one["messages"]] == [
            message["content"] for message in (*segment.prompt, *segment.said)
        ]
    assert row["response"] == several.response == row["turns"][-1]["content"]
    assert row["prompt_tokens"] == several.last.prompt_length and row["tokens"] == several.generated


def test_an_episode_can_be_copied_with_its_segments():
    several = three_episodes().episodes[1]
    copy = dataclasses.replace(several, is_left_out=True)
    assert copy.segments[1:] == several.segments[1:] and not copy.row(1.0, 0, None, 1).mask.any()
