"""An evaluation's folder: what it is of, and the groups of samples that it has, so that a cut one continues."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from nemo_rl_lite.checkpoint.resume import changed
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import CheckpointError, ConfigError, Violation
from nemo_rl_lite.rollout.collector import Group
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.store import SavedRollout, load_rollouts, save_rollouts
from nemo_rl_lite.run.folder import is_run

OUTPUT = "--output"
IDENTITY_FILE, GROUPS = "evaluation.json", "groups"
# Seconds between two files of groups.
_EVERY_S = 5.0


def claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Make the folder that of one evaluation, or check that it already is. Where nothing has been kept of another one,
    such as one whose reward did not work, the folder is taken over.

    Raises:
        ConfigError: it is a run's, has other files, or samples of another evaluation; with the first key that differs.
    """
    if is_run(folder):
        raise ConfigError([Violation(OUTPUT, str(folder), "is the folder of a run", f"{OUTPUT} ANOTHER_FOLDER")])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / IDENTITY_FILE
    if not file.exists() and any(folder.iterdir()):
        rule = "is not empty, and no evaluation has made it"
        raise ConfigError([Violation(OUTPUT, str(folder), rule, f"{OUTPUT} ANOTHER_FOLDER")])
    if not any((folder / GROUPS).glob("*.parquet")):
        write_json(file, identity)
        return
    for key, (before, now) in changed(json.loads(file.read_text()), identity, but_for=()).items():
        rule = f"the evaluation in {folder} was begun with {before!r}, and the two would be mixed"
        raise ConfigError([Violation(key, now, rule, f"the same value, or another folder: {OUTPUT} FOLDER")])


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(file)


class Journal:
    """Keeps complete groups of samples, those of a problem, in `groups/*.parquet`. A group of which a reward, an
    environment or an agent failed is not complete: the next command tries it again."""

    def __init__(self, folder: Path, problems: Sequence[Problem]):
        """Raises:
        CheckpointError: a file cannot be read.
        ConfigError: the groups are of other problems.
        """
        self._folder, self._kept_at = folder / GROUPS, -math.inf
        self._folder.mkdir(exist_ok=True)
        self.done: dict[int, list[Episode]] = {}
        try:
            for saved in load_rollouts(self._folder):
                self.done |= saved.done
        except (OSError, pa.ArrowException) as error:
            raise CheckpointError(f"{self._folder} cannot be read: {error}. Remove the folder to start again") from None
        for number, episodes in self.done.items():
            if number >= len(problems) or _asked(episodes[0].problem) != _asked(problems[number]):
                rule = f"now has other problems than when {folder} was begun"
                raise ConfigError([Violation("data", None, rule, f"{OUTPUT} ANOTHER_FOLDER")])
        self._kept = set(self.done)

    def keep(self, groups: Sequence[Group], at_once: bool = False) -> None:
        """Write the groups that are complete and not on disk yet, now and then or `at_once`. Raises OSError."""
        if not at_once and time.monotonic() - self._kept_at < _EVERY_S:
            return
        complete = {number: one.episodes for number, one in enumerate(groups) if one.is_done and _is_whole(one)}
        new = {number: episodes for number, episodes in complete.items() if number not in self._kept}
        if new:
            self._write(new)
        self._kept_at = time.monotonic()

    def _write(self, new: Mapping[int, list[Episode]]) -> None:
        """Readers of the folder see whole files alone."""
        partial, place = self._folder / ".partial", len(list(self._folder.glob("*.parquet")))
        partial.mkdir(exist_ok=True)
        save_rollouts([SavedRollout(place, [], None, new)], partial)
        for file in partial.glob(f"*{place}.parquet"):
            file.replace(self._folder / file.name)
        self._kept |= set(new)


def _is_whole(group: Group) -> bool:
    return all(episode.reward is not None for episode in group.episodes)


def _asked(problem: Problem) -> list[Any]:
    return json.loads(json.dumps([problem.messages, problem.answer], default=str))
