"""The answers of a judge by their request, so that nothing is asked twice."""

import sqlite3

from nemo_rl_lite.rewards.value import UnavailableReward

# Seconds to wait while another process writes.
_LOCK_S = 60.0


class Answers:
    """A table of texts in a file, which several processes and later runs share; without a file, for this process."""

    def __init__(self, path: str | None):
        """Raises UnavailableReward: the file cannot be used."""
        try:
            # Without a path it is a temporary file, which goes with the process.
            self._database = sqlite3.connect(path or "", timeout=_LOCK_S, autocommit=True)
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)"
            )
        except sqlite3.Error as error:
            raise UnavailableReward(f"the answers cannot be kept in {path} (cache_path): {error}") from error

    def get(self, request: str) -> str | None:
        """The answer to a request, if it was answered."""
        row = self._database.execute("SELECT answer FROM answers WHERE request = ?", (request,)).fetchone()
        return None if row is None else row[0]

    def put(self, request: str, answer: str) -> None:
        """Keep the answer to a request; the last one counts."""
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (request, answer))
