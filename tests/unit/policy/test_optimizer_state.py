"""Ranges of a parameter's elements as boxes."""

import itertools
import math

import pytest

from nemo_rl_lite.policy.optimizer_state import boxes


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (1, 5, 1), (3, 2, 4), (2, 3, 2, 2)])
def test_boxes_have_the_elements_of_a_range_in_order(shape):
    places = list(itertools.product(*map(range, shape)))
    for begin, end in itertools.combinations_with_replacement(range(len(places) + 1), 2):
        found = boxes(shape, begin, end)
        inside = [
            place
            for offset, sizes in found
            for place in itertools.product(*(range(at, at + size) for at, size in zip(offset, sizes, strict=True)))
        ]
        assert inside == places[begin:end]
        assert len(found) <= max(1, 2 * len(shape) - 1)


def test_whole_rows_are_one_box():
    assert boxes((6, 4), 4, 20) == [((1, 0), (4, 4))]
    assert boxes((6, 4), 3, 21) == [((0, 3), (1, 1)), ((1, 0), (4, 4)), ((5, 0), (1, 1))]
    assert math.prod(boxes((6, 4), 0, 24)[0][1]) == 24
