"""A reward that an untrained model also gets some of."""


def share_of_digits(response: str, answer: str) -> float:
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)
