import pytest
import torch

from nemo_rl_lite.offload.host_memory import HostArena
from nemo_rl_lite.offload.mover import HostCopy


def test_contents_come_back_into_the_same_memory():
    whole, other = torch.arange(10.0), torch.arange(5)
    view = whole[2:4]
    copy = HostCopy(lambda: [view, other], HostArena("weights", None), torch.device("cpu"))
    copy.take()
    whole.zero_()
    other.zero_()
    copy.put()
    copy.put()
    assert torch.equal(whole, torch.arange(10.0)) and torch.equal(other, torch.arange(5)) and view[0] == 2
    other += 1
    copy.take()
    other.zero_()
    copy.put()
    assert other.tolist() == [1, 2, 3, 4, 5]


def test_other_tensors_than_were_taken_are_an_error():
    tensors = [torch.ones(3)]
    copy = HostCopy(lambda: tensors, HostArena("weights", None), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="not those"):
        copy.put()
    copy.take()
    tensors.append(torch.ones(3))
    with pytest.raises(RuntimeError, match="not those"):
        copy.put()
