"""What all engines together say, without processes."""

import pytest

from nemo_rl_lite.generation.interface import Decoded, Drafts
from nemo_rl_lite.run.workers import remote_generation
from nemo_rl_lite.run.workers.remote_generation import RemoteGeneration


class Group:
    """Two engines, each of which has verified drafts since it was asked last."""

    def __init__(self, *drafts: Drafts):
        self.drafts = drafts

    def __len__(self):
        return len(self.drafts)

    def call(self, method, *arguments, phase=""):
        if method == "memory":
            return [{"device": 2 + rank, "generation_weights": 1, "kv_cache": rank} for rank in range(len(self))]
        return [Decoded(drafts=own) for own in self.drafts] if method == "take_decoded" else [None] * len(self)


@pytest.fixture(autouse=True)
def results_are_there(monkeypatch):
    monkeypatch.setattr(remote_generation, "wait", lambda *calls: [one for call in calls for one in call])


def test_drafts_of_all_engines_and_phases_are_added_up_until_somebody_asks():
    engines = RemoteGeneration(Group(Drafts(4, 12, 3), Drafts(1, 3, 2)), shares_device=False)  # pyrefly: ignore
    assert engines.take_decoded().drafts.metrics() == {}
    for _ in range(2):
        memory = engines.finish_generation()
    assert memory == {"engine/device": 3.0, "engine/generation_weights": 1.0, "engine/kv_cache": 1.0}
    drafts = engines.take_decoded().drafts
    assert drafts.metrics() == {"speculation_acceptance": 10 / 30, "speculation_accepted_length": 10 / 10}
    assert engines.take_decoded() == Decoded()
