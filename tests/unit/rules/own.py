"""Rewards, environments and agents that are only read: an import of this module fails."""

import no_such_package_anywhere


def score(response, answer, *, volume: float = 1.0):
    return volume


def gold_first(reference, prediction):
    return 1.0


async def paced(problem, endpoint, seconds: float = 1.0):
    return None


async def later(response, answer):
    return 1.0


def of_trl(prompts, completions, **kwargs):
    return [1.0] * len(prompts)


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def many(responses, answers, *, volume=1.0):
    return [volume for _ in responses]


def swapped(answer, response):
    return 1.0


def asked(prompt, completion):
    return 1.0


@no_such_package_anywhere.takes_anything
def decorated(prompt):
    return prompt


async def plays(problem, endpoint, *, tool=None):
    return None


async def acts(state):
    return None


class Assigned:
    step = later


class Mute:
    def speak(self):
        return None


class Fine:
    async def step(self, problem, conversation):
        return None


class Sized(Fine):
    def __init__(self, size: int | None = None):
        self.size = size


class Closes(Fine):
    def step(self, problem, conversation):
        return None

    def close(self, session):
        return None


class Narrow:
    def step(self, action):
        return None


class Static:
    @staticmethod
    def step(problem):
        return None


class Fits:
    @staticmethod
    def step(problem, conversation, limit=3):
        return None
