import torch

from nemo_rl_lite.offload.phases import optimizer_tensors


def stepped(*weights: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


def test_states_and_master_weights_are_the_optimizers_own():
    model, master = torch.ones(10, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(10))
    optimizer = stepped(master)
    held = optimizer_tensors([optimizer], [model])
    state = optimizer.state[master]
    assert {id(tensor) for tensor in held} == {
        id(tensor) for tensor in (master, state["exp_avg"], state["exp_avg_sq"], state["step"])
    }


def test_what_shares_memory_with_the_model_is_the_models():
    buffer = torch.zeros(10)
    shard = torch.nn.Parameter(buffer[:5])
    held = optimizer_tensors([stepped(shard)], [buffer])
    assert len(held) == 3 and not any(tensor is shard for tensor in held)


def test_an_optimizer_before_its_first_step_holds_its_weights_alone():
    weight = torch.nn.Parameter(torch.ones(3))
    assert [id(tensor) for tensor in optimizer_tensors([torch.optim.AdamW([weight])], [])] == [id(weight)]
    assert optimizer_tensors([], []) == []
