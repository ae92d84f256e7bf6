"""A user's rewards, environment and agent."""


def score(response, answer, *, volume: float = 1.0):
    return volume


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def many(responses, answers):
    return [1.0 for _ in responses]


async def plays(problem, endpoint):
    return None


class Game:
    def step(self, problem, conversation):
        return None
