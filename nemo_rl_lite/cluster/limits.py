"""Time limits of phases, which become shorter once the run has measured them."""

from dataclasses import dataclass, field

# Phases of regular length. Saves, exports and data depend on file systems.
MEASURED = ("logprobs", "train", "refit", "engine step")
# Calls before a phase's own times count. The first ones compile.
FIRST_CALLS = 20
# A call is slow, or hangs, after this many times the longest call so far, and at least this many seconds.
SLOW_RATIO, SLOW_S = 3.0, 120.0
HANG_RATIO, HANG_S = 10.0, 600.0


@dataclass
class PhaseLimits:
    """Time limits of the calls of a group of workers."""

    most_s: float | None
    """Limit of all phases in seconds (None: no limit)."""
    _calls: dict[str, int] = field(default_factory=dict)
    _longest_s: dict[str, float] = field(default_factory=dict)

    def note(self, phase: str, seconds: float) -> None:
        """Count a call that took `seconds`."""
        self._calls[phase] = self._calls.get(phase, 0) + 1
        self._longest_s[phase] = max(seconds, self._longest_s.get(phase, 0.0))

    def hang_s(self, phase: str) -> float | None:
        """Return the seconds after which a call hangs; None: never."""
        longest_s = self._known_s(phase)
        if self.most_s is None or longest_s is None:
            return self.most_s
        return min(self.most_s, max(HANG_S, HANG_RATIO * longest_s))

    def slow_s(self, phase: str) -> float | None:
        """Return the seconds after which a call is slow; None if its usual length is unknown."""
        longest_s = self._known_s(phase)
        return None if longest_s is None else max(SLOW_S, SLOW_RATIO * longest_s)

    def _known_s(self, phase: str) -> float | None:
        return self._longest_s[phase] if phase in MEASURED and self._calls.get(phase, 0) >= FIRST_CALLS else None
