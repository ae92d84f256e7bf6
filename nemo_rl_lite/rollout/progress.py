"""How far a rollout is, in one line."""

from collections import Counter
from collections.abc import Sequence

from nemo_rl_lite.rollout.groups import Group


def progress(groups: Sequence[Group], wanted: int, seconds: float) -> str:
    """Say how many of the `wanted` prompts are done, how fast tokens came in these `seconds`, and what the episodes
    under way wait for. Tokens count once their response is done."""
    episodes = [episode for group in groups for episode in group.episodes]
    done = sum(group.is_done for group in groups)
    said = [f"{done} of {max(wanted, len(groups))} prompts"]
    if tokens := sum(episode.generated for episode in episodes):
        said.append(f"{tokens / seconds:,.0f} tokens/s")
    waiting = [episode for episode in episodes if episode.waits_for]
    if generating := [episode.spans[-1].seconds for episode in waiting if episode.waits_for == "generate"]:
        said.append(f"{len(generating)} responses under way, the longest for {max(generating):.0f} s")
    counts = Counter(episode.waits_for for episode in waiting)
    said += [f"{counts[what]} wait for the {what}" for what in ("environment", "reward") if counts[what]]
    return ", ".join(said)
