"""Environments that reward turns for their digits. Processes of environments import this module, and nothing else that
takes long."""

from dataclasses import replace

from nemo_rl_lite.environments.interface import Observation


class Digits:
    """Rewards each turn for the digits in it, and ends with the first turn that has a 7."""

    def step(self, problem, conversation):
        digits = {letter for letter in conversation[-1]["content"] if letter.isdigit()}
        messages = ({"role": "user", "content": "12"},)
        return Observation(messages, "7" in digits, len(digits) / 10)


class LastDigits(Digits):
    """Rewards only the last turn."""

    def step(self, problem, conversation):
        found = super().step(problem, conversation)
        return found if found.done else replace(found, reward=None)

    def cut_short(self, problem, conversation):
        return super().step(problem, conversation).reward
