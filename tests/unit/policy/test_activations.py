"""megatron-core's manager runs on a CPU: it tracks tensors as on a GPU, and offloads nothing."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.compat.megatron_cpu import prepare_import
from nemo_rl_lite.policy import activation_offload
from nemo_rl_lite.validation.compose import compose_config

CORE = ["policy.megatron_cfg.offload_modules=[core_attn]"]
MODULES = ("core_attn", "mlp_norm")
LAYERS = 2


def settings(*arguments: str):
    gpu = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=transformers"]
    sizes = ["policy.max_total_sequence_length=64", "generation.max_new_tokens=16"]
    return compose_config([*gpu, *sizes, *arguments]).policy.megatron_cfg


class Event:
    """An event that takes arguments, unlike torch.cpu's."""

    def __init__(self, external: bool = False):
        pass

    def record(self, stream: object = None) -> None:
        pass


class Model(torch.nn.Module):
    """Calls the manager as megatron-core's models and layers do."""

    def __init__(self, interface):
        super().__init__()
        self.config = SimpleNamespace(fine_grained_activation_offloading=True)
        self.layer = torch.nn.Module()
        self.layer.config = self.config
        self._interface = interface

    def forward(self, x):
        if self.config.fine_grained_activation_offloading:
            self._interface.init_chunk_handler(0, None, None, 0, 0, 1.0)
        for _ in range(LAYERS):
            for module in MODULES:
                offload = self._interface(module != "core_attn" or self.training, x, module)
                with offload as x:
                    x = x.sin()
                x = offload.group_offload(x)
        return x

    def run(self, micro_batches: int, forward_only: bool = False) -> None:
        """A pass as megatron-core's schedules do it; checks the gradients."""
        self.train(not forward_only)
        for _ in range(micro_batches):
            x = torch.ones(3, requires_grad=not forward_only)
            out = self(x)
            if not forward_only:
                out.sum().backward()
                expected, value = 1.0, torch.tensor(1.0)
                for _ in range(LAYERS * len(MODULES)):
                    expected, value = expected * value.cos().item(), value.sin()
                torch.testing.assert_close(x.grad, torch.full((3,), expected))
        if self.config.fine_grained_activation_offloading:
            self._interface.reset()


@pytest.fixture
def model(monkeypatch):
    prepare_import()
    import megatron.core.extensions.transformer_engine as extension
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    monkeypatch.setattr(torch.cpu, "Event", Event)
    monkeypatch.setattr(extension, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False))
    monkeypatch.setattr(offload, "print_offload_summary_table", lambda _: None)
    monkeypatch.setattr(offload.PipelineOffloadManager, "OFFLOAD_MGR", None)
    waited = []
    monkeypatch.setattr(activation_offload, "_wait_for_copies_out", lambda *_: waited.append(True))
    model = Model(offload.FineGrainedActivationOffloadingInterface)
    model.manager, model.waited = offload.PipelineOffloadManager.get_instance, waited
    return model


def test_experts_offload_as_a_whole_where_transformer_engine_fuses_them(monkeypatch):
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    provider = SimpleNamespace()
    chosen = settings("policy.megatron_cfg.fine_grained_activation_offloading=true", *CORE)
    activation_offload.set_fields(provider, replace(chosen, offload_modules=["fused_group_mlp"]))
    assert provider.use_transformer_engine_op_fuser and provider.offload_modules == ["fused_group_mlp"]
    others = SimpleNamespace()
    activation_offload.set_fields(others, chosen)
    assert not hasattr(others, "use_transformer_engine_op_fuser")


def train(model, micro_batches: int) -> None:
    with activation_offload.training_pass([model], micro_batches):
        model.run(micro_batches)


def score(model, micro_batches: int) -> None:
    with torch.no_grad(), activation_offload.suspended([model]):
        model.run(micro_batches, forward_only=True)


class MLP(torch.nn.Module):
    """Returns result and bias, as megatron-core's MLP does."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return x.exp().cos(), None


def test_a_watched_module_is_a_group_of_its_own_with_the_same_gradients(model):
    mlp = MLP(model.config)
    model.layer.mlp = mlp
    activation_offload.watch(mlp)

    class Watched(Model):
        def forward(self, x):
            if self.config.fine_grained_activation_offloading:
                self._interface.init_chunk_handler(0, None, None, 0, 0, 1.0)
            return self.layer.mlp(x)[0]

        def run(self, micro_batches, forward_only=False):
            for _ in range(micro_batches):
                x = torch.rand(3, requires_grad=not forward_only)
                out = self(x)
                if not forward_only:
                    out.sum().backward()
                    torch.testing.assert_close(x.grad, -x.exp().sin() * x.exp())
            if self.config.fine_grained_activation_offloading:
                self._interface.reset()

    model.__class__ = Watched
    train(model, 2)
    chunks = model.manager()._cached_chunks_forward
    assert [[group._name for group in chunk.offload_groups] for chunk in chunks] == [[activation_offload.MLP]] * 2
    score(model, 3)
    train(model, 2)
    assert model.manager()._cached_chunks_forward is chunks


def test_passes_without_gradients_are_not_the_pattern(model):
    score(model, 3)
    assert not model.manager()._cached_chunks_forward
    train(model, 2)
    assert len(model.manager()._cached_chunks_forward) == 2
    assert all(len(chunk.offload_groups) == LAYERS * len(MODULES) for chunk in model.manager()._cached_chunks_forward)
    manager = model.manager()
    score(model, 5)
    assert model.manager() is manager and manager._cached_chunks_index_forward == 0
    train(model, 2)
    assert model.manager() is manager


def test_a_longer_pass_becomes_the_pattern_and_a_shorter_one_does_not(model):
    train(model, 2)
    first = model.manager()
    assert len(model.waited) == 2
    train(model, 1)
    assert model.manager() is first and len(model.waited) == 2
    train(model, 3)
    assert model.manager() is not first and len(model.manager()._cached_chunks_forward) == 3
    assert len(model.waited) == 5
    assert isinstance(model.manager().cpu_tensor_pool, activation_offload.HostBuffers)


@pytest.mark.parametrize("paused", [True, False])
def test_without_a_pause_a_pass_without_gradients_would_end_the_offload(paused, model):
    """If megatron-core fixes this, the test fails, and `suspended` can be removed."""
    if paused:
        score(model, 1)
    else:
        with torch.no_grad():
            model.run(1, forward_only=True)
    model.train()
    model(torch.ones(3, requires_grad=True))
    assert (model.manager().cur_forward_chunk() is not None) == paused


@pytest.mark.parametrize(("known", "micro_batches", "offloads"), [(2, 2, True), (2, 1, True), (2, 3, False)])
def test_beyond_its_pattern_megatron_core_offloads_nothing(known, micro_batches, offloads, model):
    """If megatron-core fixes this, the test fails, and `training_pass` can be removed."""
    train(model, known)
    for _ in range(micro_batches):
        model(torch.ones(3, requires_grad=True)).sum().backward()
    assert (model.manager().cur_forward_chunk() is not None) == offloads


def test_after_an_error_all_is_as_before(model):
    train(model, 1)
    with pytest.raises(KeyError), activation_offload.suspended([model]):
        assert not model.config.fine_grained_activation_offloading
        assert not model.manager().do_offload
        raise KeyError
    assert model.config.fine_grained_activation_offloading and model.manager().do_offload
    assert all(chunk.do_offload for chunk in model.manager()._cached_chunks_forward)
    with pytest.raises(KeyError), activation_offload.training_pass([model], 2):
        raise KeyError
    assert not model._forward_hooks
    train(model, 2)


def test_a_pass_that_another_rank_has_ended_leaves_nothing(model):
    train(model, 2)
    before = model.manager()
    model.train(True)
    model(torch.ones(3, requires_grad=True))
    activation_offload.forget_pass([model])
    assert model.manager() is not before and not model.manager()._cached_chunks_forward
    train(model, 2)
    assert len(model.manager()._cached_chunks_forward) == 2
