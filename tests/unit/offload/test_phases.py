"""A policy of a few tensors goes through the phases of a step."""

import time
from contextlib import nullcontext

import pytest
import torch

from nemo_rl_lite.offload.host_memory import HostArena
from nemo_rl_lite.offload.mover import Movable
from nemo_rl_lite.offload.phases import GradientBuffers, PhaseMemory, Prefetch, optimizer_tensors
from nemo_rl_lite.offload.residency import Component, Phase, Residency
from nemo_rl_lite.validation.compose import compose_config

CPU = torch.device("cpu")
# The configuration is that of engines that sleep on the policy's GPU.
SHARED = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=vllm_gpu"]
SHARED += ["policy.max_total_sequence_length=64", "generation.max_new_tokens=16"]
STEP = (Phase.REFIT, Phase.GENERATE, Phase.LOGPROB, Phase.TRAIN)


class Policy:
    """Parameters, gradients and optimizer states of 1600 bytes in all, and a device of `total` bytes that knows what is
    on it. `cached` of the free bytes belong to this process until it trims its cache."""

    def __init__(self, *overrides: str, total: int = 10_000):
        config = compose_config([*SHARED, *overrides])
        self.parameters, self.states = torch.arange(100.0), torch.arange(200.0)
        self.gradients = torch.ones(100)
        self.total, self.cached, self.trimmed = total, 0, 0
        self.memory = PhaseMemory(
            Residency.of(config),
            Movable("parameters", lambda: [self.parameters], HostArena("parameters", None), CPU),
            Movable("optimizer_states", lambda: [self.states], HostArena("states", None), CPU),
            GradientBuffers([self.gradients]),
            overlap=config.policy.overlap_offload,
            device=self,
        )

    def free_here(self) -> int:
        return self.total - sum(self.held())

    def free_elsewhere(self) -> int:
        return self.free_here() - self.cached

    def trim(self) -> None:
        self.cached = 0
        self.trimmed += 1

    def held(self) -> tuple[int, int, int]:
        held = self.memory.device_bytes()
        return held["parameters"], held["gradients"], held["optimizer_states"]

    def enter_with_copies_done(self, phase: Phase) -> None:
        """Enter the phase with overlap, and return when copies are made, but nothing has settled."""
        self.memory.enter(phase, working_bytes=1000)
        moving = [own for own in self.memory._movable.values() if own.moving]
        assert moving
        while not all(own.done for own in moving):
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [(400, 400, 800), (400, 400, 800), (400, 0, 800), (400, 400, 800)]),
        (["offload=logprob"], [(400, 400, 800), (400, 400, 800), (400, 0, 0), (400, 400, 800)]),
        (["offload=colocated"], [(400, 0, 0), (0, 0, 0), (400, 0, 0), (400, 400, 800)]),
        (
            ["policy.offload_for_generation=[optimizer_states]"],
            [(400, 400, 0), (400, 400, 0), (400, 0, 0), (400, 400, 800)],
        ),
        (["policy.offload_for_generation=[gradients]"], [(400, 0, 800)] * 3 + [(400, 400, 800)]),
    ],
)
def test_each_phase_has_what_the_table_says(overrides, expected):
    policy = Policy(*overrides)
    for _ in range(2):
        for phase, held in zip(STEP, expected, strict=True):
            for _ in range(2):
                policy.memory.enter(phase)
            assert policy.held() == held, phase
    assert torch.equal(policy.parameters, torch.arange(100.0)) and torch.equal(policy.states, torch.arange(200.0))
    # The cache is trimmed whenever an engine may need the memory.
    assert policy.trimmed >= 8


def test_every_phase_may_follow_every_other():
    policy = Policy("offload=colocated", "policy.offload_optimizer_states_for_logprob=true")
    for before in STEP:
        for after in STEP:
            policy.memory.enter(before)
            policy.memory.enter(after)
            policy.memory.enter(Phase.TRAIN)
            assert policy.held() == (400, 400, 800)
            assert torch.equal(policy.parameters, torch.arange(100.0))


def test_what_leaves_may_do_so_while_the_engine_wakes():
    policy = Policy("offload=pinned")
    # Gradients are gone by then: 8800 bytes are free, 500 of which stay free.
    policy.memory.enter(Phase.REFIT, working_bytes=8_299)
    assert policy.held() == (400, 0, 800)
    with pytest.raises(RuntimeError, match="optimizer_states are not on the device"):
        policy.memory.require(Component.OPTIMIZER_STATES)
    policy.memory.enter(Phase.GENERATE)
    assert policy.held() == (0, 0, 0)


def test_it_does_not_where_both_would_not_fit(caplog):
    policy = Policy("offload=pinned")
    with caplog.at_level("INFO"):
        for _ in range(2):
            policy.memory.enter(Phase.REFIT, working_bytes=8_300)
            assert policy.held() == (400, 0, 0)
            policy.memory.enter(Phase.TRAIN)
    assert sum("do not always overlap with other work" in record.getMessage() for record in caplog.records) == 1


def test_what_comes_back_needs_room_as_well():
    overrides = ["policy.offload_for_generation=[parameters,gradients]", "policy.overlap_offload=true"]
    policy = Policy(*overrides, "policy.offload_optimizer_states_for_logprob=true", total=4_000)
    policy.memory.enter(Phase.GENERATE)
    assert policy.held() == (0, 0, 800)
    # 3200 bytes are free, 200 stay free: 2700 and the parameters do not fit in addition to the leaving states.
    policy.memory.enter(Phase.LOGPROB, working_bytes=2_700)
    assert policy.held() == (400, 0, 0)
    policy.memory.enter(Phase.GENERATE)
    policy.memory.enter(Phase.TRAIN)
    policy.memory.enter(Phase.GENERATE)
    policy.memory.enter(Phase.LOGPROB, working_bytes=2_500)
    assert policy.held() == (400, 0, 800)


def test_where_a_return_finds_the_device_full_what_is_leaving_goes_first(monkeypatch):
    overrides = ["policy.offload_for_generation=[parameters]", "policy.overlap_offload=true"]
    policy = Policy(*overrides, "policy.offload_optimizer_states_for_logprob=true")
    policy.memory.enter(Phase.GENERATE)
    reload = Movable.reload

    def on_a_full_device(own: Movable) -> None:
        if own.name == "parameters" and policy.states.untyped_storage().nbytes():
            raise torch.OutOfMemoryError("full")
        reload(own)

    monkeypatch.setattr(Movable, "reload", on_a_full_device)
    policy.memory.enter(Phase.LOGPROB, working_bytes=0)
    assert policy.held() == (400, 0, 0)
    monkeypatch.setattr(Movable, "reload", reload)
    policy.memory.enter(Phase.TRAIN)
    assert policy.held() == (400, 400, 800) and torch.equal(policy.states, torch.arange(200.0))


def test_states_come_back_before_the_last_micro_batch():
    policy = Policy("offload=pinned")
    for phase in (Phase.REFIT, Phase.GENERATE, Phase.LOGPROB):
        policy.memory.enter(phase)
    between = policy.memory.between_micro_batches(Phase.TRAIN, working_bytes=1000, around=nullcontext)
    between(2, 0)
    assert policy.held() == (400, 0, 0)
    between(1, 0)
    assert policy.held() == (400, 0, 800)
    policy.memory.enter(Phase.TRAIN)
    assert policy.held() == (400, 400, 800) and torch.equal(policy.states, torch.arange(200.0))


def test_states_leave_beside_the_first_micro_batches_and_come_back_beside_the_last():
    policy = Policy("offload=logprob", "policy.overlap_offload=true")
    policy.enter_with_copies_done(Phase.LOGPROB)
    assert policy.held() == (400, 0, 800)
    between = policy.memory.between_micro_batches(Phase.TRAIN, working_bytes=1000, around=nullcontext)
    between(3, 0)
    assert policy.held() == (400, 0, 0)
    between(1, 0)
    policy.memory.enter(Phase.TRAIN)
    assert policy.held() == (400, 400, 800) and torch.equal(policy.states, torch.arange(200.0))
    assert [name for name, _ in policy.memory.pop_moves()] == [
        "optimizer_states/to_host",
        "optimizer_states/to_device",
    ]


def test_states_may_come_back_while_training_has_begun():
    """What training needs at once is there, and the states when somebody waits for them."""
    policy = Policy("offload=pinned")
    policy.memory.enter(Phase.GENERATE)
    with pytest.raises(RuntimeError, match="optimizer_states are not on the device"):
        policy.memory.expect(Component.OPTIMIZER_STATES)
    policy.memory.enter(Phase.TRAIN, later=[Component.OPTIMIZER_STATES])
    policy.memory.require(Component.PARAMETERS)
    policy.memory.expect(Component.OPTIMIZER_STATES)
    with pytest.raises(RuntimeError, match="optimizer_states are not on the device"):
        policy.memory.require(Component.OPTIMIZER_STATES)
    # Whoever enters the phase again does not wait for them either.
    policy.memory.enter(Phase.TRAIN, later=[Component.OPTIMIZER_STATES])
    assert policy.memory._movable[Component.OPTIMIZER_STATES].moving
    # Their memory is taken, so that the work that overlaps cannot take it.
    assert policy.held() == (400, 400, 800)
    policy.memory.arrive(Component.OPTIMIZER_STATES)
    policy.memory.require(Component.OPTIMIZER_STATES)
    assert torch.equal(policy.states, torch.arange(200.0))


def test_a_phase_without_them_waits_for_states_that_are_coming_back():
    policy = Policy("offload=pinned")
    policy.memory.enter(Phase.GENERATE)
    for phase, held in ((Phase.GENERATE, (0, 0, 0)), (Phase.TRAIN, (400, 400, 800))):
        policy.memory.enter(Phase.TRAIN, later=[Component.OPTIMIZER_STATES])
        policy.memory.enter(phase)
        assert policy.held() == held and not policy.memory._movable[Component.OPTIMIZER_STATES].moving
    assert torch.equal(policy.states, torch.arange(200.0))


def test_what_has_one_place_throughout_never_moves():
    policy = Policy(
        "cluster.gpus_per_node=1",
        "policy=megatron_gpu",
        "generation=vllm_gpu",
        "policy.model_name=a/b",
        "offload=cpu_optimizer",
    )
    for phase in STEP:
        policy.memory.enter(phase)
        assert policy.held() == (400, 0 if phase is Phase.LOGPROB else 400, 800)
        policy.memory.require(Component.OPTIMIZER_STATES)
    assert policy.memory.pop_moves() == []


def test_states_wait_where_they_would_not_fit_beside_the_work():
    policy = Policy("offload=pinned")
    for phase in (Phase.REFIT, Phase.GENERATE, Phase.LOGPROB):
        policy.memory.enter(phase)
    # 9600 bytes are free, 500 stay free.
    between = policy.memory.between_micro_batches(Phase.TRAIN, working_bytes=8_300, around=nullcontext)
    between(1, 0)
    assert policy.held() == (400, 0, 0)
    policy.memory.enter(Phase.TRAIN)
    assert policy.held() == (400, 400, 800)


def test_a_prefetch_begins_when_what_is_left_takes_as_long_as_the_transfer(monkeypatch):
    now, begun = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    prefetch = Prefetch(transfer_s=2.5, begin=lambda: begun.append(now[0]))
    for remaining in range(10, 0, -1):
        prefetch(remaining)
        now[0] += 1.0
    # With two micro-batches left, two seconds are left. A move that could not begin then is retried.
    assert begun == [8.0, 9.0]


def test_gradients_that_accumulate_stop_a_change_of_phase():
    policy = Policy("offload=colocated")
    with policy.memory.gradients.accumulating(), pytest.raises(RuntimeError, match="being accumulated"):
        policy.memory.enter(Phase.REFIT)
    assert policy.held() == (400, 400, 800)


def test_host_memory_is_released_once_everything_is_back():
    policy = Policy("offload=colocated")
    policy.memory.enter(Phase.GENERATE)
    with pytest.raises(RuntimeError, match="in host memory only"):
        policy.memory.release()
    policy.memory.enter(Phase.TRAIN)
    policy.memory.release()


def test_dropped_gradients_come_back_as_zeros_under_the_same_views():
    buffer = torch.ones(100)
    view = buffer[20:30]
    gradients = GradientBuffers([buffer])
    for _ in range(2):
        gradients.drop()
        assert gradients.device_bytes() == 0
    for _ in range(2):
        gradients.allocate()
        assert gradients.device_bytes() == 400
    assert torch.equal(view, torch.zeros(10))
    view += 1
    assert buffer.sum() == 10
    gradients.allocate()
    assert buffer.sum() == 10


def test_gradients_either_accumulate_or_are_dropped():
    buffer = torch.ones(4)
    gradients = GradientBuffers([buffer])
    with gradients.accumulating(), pytest.raises(RuntimeError, match="being accumulated"):
        gradients.drop()
    assert torch.equal(buffer, torch.ones(4))
    with pytest.raises(ZeroDivisionError), gradients.accumulating():
        raise ZeroDivisionError
    gradients.drop()
    with pytest.raises(RuntimeError, match="prepare_for_training"), gradients.accumulating():
        pass


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
