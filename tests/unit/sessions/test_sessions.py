"""Recorded sessions of real harnesses, sent again: their rows, and what these train on.

Recorded by `record.py` from Claude Code 2.1.197, Codex 0.171.0 and mini-swe-agent 2.4.6.
"""

import json
from pathlib import Path

import httpx
import pytest

from tests.unit.rollout.test_agents import trained_once
from tests.unit.sessions.record import played

# Number of responses in each row. Claude Code and Codex compact, mini-swe-agent leaves out what it cannot use.
SESSIONS = {"claude_code": [3, 1, 1], "codex": [3, 1, 1], "mini_swe_agent": [2, 1]}


class Session:
    """Sends recorded requests, with the ids of the calls that it gets."""

    def __init__(self, requests: list[dict], entries: list[dict]):
        self._requests, self._entries = requests, entries

    async def play(self, problem, endpoint):
        ids, headers = dict[str, str](), {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as client:
            for number, one in enumerate(self._requests):
                body = json.dumps(one["body"])
                for recorded, own in ids.items():
                    body = body.replace(f'"{recorded}"', f'"{own}"')
                said = await client.post(f"{endpoint.anthropic_base_url}{one['path']}", content=body)
                assert said.status_code == 200, said.text
                issued = [call["id"] for reply in self._entries[number]["replies"] for call in reply.calls]
                ids |= dict(zip(one["calls"], issued, strict=True))
        return 1.0


@pytest.mark.parametrize("name", SESSIONS)
def test_a_recorded_session_has_the_rows_of_the_harness(tmp_path, name):
    recorded = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    entries: list[dict] = []
    session = Session(recorded["requests"], entries)
    rollout, policy = played(session, recorded["said"], 400_000, tmp_path, entries)
    (episode,) = rollout.episodes
    assert episode.failure is None
    assert [len(one.turns) for one in episode.segments] == recorded["turns"] == SESSIONS[name]
    trained_once(rollout, policy)
    # Of each row the loss has what was said in it, and nothing else.
    said = [[*policy.tokenizer._tokens(text), *policy.tokenizer.end_tokens] for text in recorded["said"]]
    for number, row in enumerate(rollout.rows([1.0], 0)):
        own = [text for place, text in zip(episode.order, said, strict=True) if place == number]
        assert row.tokens[row.mask.astype(bool)].tolist() == [token for text in own for token in text]
