"""What goes wrong in a worker arrives at the driver with its message."""

import pytest

from nemo_rl_lite.cluster.actor import errors_that_travel
from nemo_rl_lite.errors import DataError


class Stays(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_be_sent_says_the_same():
    with pytest.raises(RuntimeError, match=r"^Stays: 1 and 2$") as caught, errors_that_travel():
        raise Stays(1, 2)
    assert isinstance(caught.value.__cause__, Stays)


def test_other_errors_stay_what_they_are():
    with pytest.raises(DataError, match="no rows"), errors_that_travel():
        raise DataError("no rows")
