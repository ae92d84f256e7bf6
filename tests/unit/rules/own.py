"""Rewards and environments that are only read: an import of this module fails."""

import no_such_package_anywhere


def score(response, answer, *, volume=1.0):
    return volume


async def later(response, answer):
    return 1.0


def of_trl(prompts, completions, **kwargs):
    return [1.0] * len(prompts)


@no_such_package_anywhere.takes_anything
def decorated(prompt):
    return prompt


class Assigned:
    step = later


class Mute:
    def speak(self):
        return None
