"""One policy rank: its phases, batches, refits and saves. A plain class; `cluster/` runs it in an actor. `scoring.py`
and `training.py` have its passes."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.compat.bridge import auto_bridge
from nemo_rl_lite.compat.megatron import hide_wandb
from nemo_rl_lite.config.sections.generation import RefitConfig
from nemo_rl_lite.config.sections.policy import PolicyConfig
from nemo_rl_lite.config.sections.run import ClusterConfig
from nemo_rl_lite.host import numa
from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.interface import Loss, Normalizers
from nemo_rl_lite.observability.memory import MemoryMeter, Peaks
from nemo_rl_lite.observability.timer import SETUP
from nemo_rl_lite.offload.cpu_optimizer import stays_on_host, step_threads
from nemo_rl_lite.offload.mover import Move
from nemo_rl_lite.offload.residency import Component, Phase, Residency
from nemo_rl_lite.policy.megatron import leftovers
from nemo_rl_lite.policy.megatron.checkpoint import PolicyState
from nemo_rl_lite.policy.megatron.conversion import export_folder
from nemo_rl_lite.policy.megatron.graphs import CudaRecorder, MicroBatchGraphs
from nemo_rl_lite.policy.megatron.memory import phase_memory, require_weights
from nemo_rl_lite.policy.megatron.micro_batches import Layout
from nemo_rl_lite.policy.megatron.model import ParallelPlace, build_model, leave_groups
from nemo_rl_lite.policy.megatron.optimizer import build_optimizer, disconnect
from nemo_rl_lite.policy.megatron.producer import plan_refit
from nemo_rl_lite.policy.megatron.reference import kept_reference
from nemo_rl_lite.policy.megatron.scoring import Scoring
from nemo_rl_lite.policy.megatron.training import Training
from nemo_rl_lite.refit.layout.plan import RefitPlan
from nemo_rl_lite.refit.transport.interface import Offer
from nemo_rl_lite.refit.transport.one_copy import FrozenBytes, SharedWeights
from nemo_rl_lite.refit.transport.report import RefitReport

log = logging.getLogger(__name__)


def preload() -> None:
    """Import the modules that take long to import."""
    hide_wandb()
    auto_bridge()


class MegatronWorker:
    """The policy on this rank. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in the environment.

    Every method is collective: all ranks call it. Results are None on ranks that do not report
    (`ParallelPlace.reports`) and hold no torch tensors: megatron-core changes how those are pickled, so that
    a reader would have to import it.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        cluster: ClusterConfig,
        model_path: str,
        seed: int,
        temperature: float,
        keep_reference: bool,
        sequences_together: int,
        threads: int,
        on_gpu: bool,
        residency: Residency,
        resume_layouts: str,
    ):
        # Bind before anything else, so that threads and page-locked memory are near the GPU.
        if on_gpu and cluster.numa_binding:
            log.info("%s", numa.bind(numa.gpu_address()).describe())
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._model_path, self._rank = Path(model_path), int(os.environ["RANK"])
        with SETUP("model"):
            self._model = build_model(policy, model_path, on_gpu, cluster.collective_timeout_s, seed)
        with SETUP("optimizer"):
            optimizer, scheduler = build_optimizer(policy, self._model)
        if stays_on_host(policy.megatron_cfg.optimizer) and cluster.threads_per_worker is None:
            torch.set_num_threads(step_threads())
        reference = kept_reference(policy, self._model) if keep_reference else None
        training = Layout.configured(policy, "train", on_gpu, sequences_together)
        logprobs = Layout.configured(policy, "logprob", on_gpu)
        log.info("micro-batches: %s for training, %s for logprobs", training, logprobs)
        self._phases = phase_memory(policy, self._model, optimizer, residency)
        self._memory = MemoryMeter(self._phases.device_bytes)
        self._scoring = Scoring(self._model, reference, logprobs, temperature, self._phases, self._memory)
        self._training = Training(
            self._model,
            optimizer,
            scheduler,
            training,
            graphs=MicroBatchGraphs(self._model, CudaRecorder()) if training.in_buckets else None,
            temperature=temperature,
            weight_decay=policy.megatron_cfg.optimizer.weight_decay,
            seed=seed,
            phases=self._phases,
            memory=self._memory,
        )
        self._held: dict[str, Batch] = {}
        self._state = PolicyState(self._model, optimizer, scheduler, resume_layouts)

    def place(self) -> ParallelPlace:
        return self._model.place

    def prepare_for_logprob(self) -> None:
        """Enter the logprob phase; every `prepare_for_...` may come after any other, and again."""
        self._leave_training(Phase.LOGPROB, working_bytes=self._memory.working_bytes("logprob"))

    def prepare_for_training(self) -> None:
        """Enter the training phase: everything that training needs is on the device, but for the optimizer's states,
        which may still be on their way until the optimizer steps."""
        self._phases.enter(Phase.TRAIN, later=[Component.OPTIMIZER_STATES])

    def prepare_for_refit(self, engine_bytes: int) -> None:
        """Enter the refit phase. Moves to the host may overlap with an engine on this device that takes `engine_bytes`
        for its weights, if there is room."""
        self._leave_training(Phase.REFIT, working_bytes=engine_bytes)

    def prepare_for_generation(self) -> None:
        """Enter the generation phase: the engines have the room that the residency gives them."""
        self._leave_training(Phase.GENERATE)
        self._memory.note("generate")

    def release_host_memory(self) -> None:
        """Release the host memory of moves at the end of a run, with all components on the device."""
        self._leave_training(Phase.TRAIN)
        self._phases.release()

    def take_moves(self) -> list[tuple[str, Move]]:
        """Moves between device and host since the last call, by "<component>/to_host" or "/to_device"."""
        return self._phases.take_moves()

    def take_passes(self) -> dict[str, list[float]]:
        """Seconds of this rank's own part of each pass since the last call, by phase; empty without other replicas."""
        return self._model.clock.take()

    def logprobs(self, tokens_BT: Tensor, lengths_B: Tensor, phase: str = "probe") -> np.ndarray | None:
        """Logprobs [B, T] of a few sequences at the sampling temperature; entry t belongs to token t, entry 0 is 0."""
        scored = self._scoring.scores(tokens_BT, lengths_B, phase)
        return scored["logprobs"].numpy() if scored is not None and self._model.place.reports else None

    def hold(self, rows: Sequence[TokenRow], name: str = "train") -> None:
        """Keep this replica's share of a batch, padded to its longest row, instead of an older one of this name."""
        self._held[name] = Batch.padded(rows)

    def score(
        self, which: Sequence[str], counts: Normalizers, name: str = "train", first: int = 0
    ) -> dict[str, float] | None:
        """Add `previous` or `reference` logprobs to a held batch, or both; previous ones from the row `first` on.
        Returns this replica's share of the `mismatch_metrics` of a global batch with these counts, if engines sampled
        its rows and they now have previous logprobs."""
        self._held[name], measured = self._scoring.score(self._held[name], which, counts, first)
        return measured

    def evaluate(self, rows: int, loss: Loss, counts: Normalizers, name: str = "train") -> dict[str, float] | None:
        """The loss and its metrics of the first `rows` rows of a held batch; None where there are none."""
        return self._scoring.evaluate(self._held[name], rows, loss, counts)

    def train(
        self,
        loss: Loss,
        counts: Normalizers,
        rows: slice = slice(None),
        name: str = "train",
        mismatch_counts: Normalizers | None = None,
    ) -> tuple[dict[str, float], dict[str, float]] | None:
        """One optimizer step on `rows` of a held batch, this rank's share of a global batch; `mismatch_counts`: see
        `forward_backward`. Returns the metrics of the step, and of the mismatch. These are this replica's
        share, except `grad_norm`, `lr`, `wd` and `skipped_steps`, which are whole on every replica. Where a gradient is
        not finite, weights, optimizer and schedule stay as they are, `skipped_steps` is 1 and `grad_norm` is NaN."""
        return self._training.step(self._held[name].rows(rows), loss, counts, mismatch_counts)

    def take_memory(self) -> Peaks:
        """Peak memory of the phases since the last call; empty on a CPU."""
        return self._memory.take()

    def plan_refit(
        self, config: RefitConfig, shared_device: bool, consumers: int, adapters_alone: bool = False
    ) -> RefitPlan | None:
        """See `producer.plan_refit`; rank 0 returns the plan."""
        require_weights(self._model, self._phases)
        self._producer = plan_refit(self._model, config, shared_device, consumers, adapters_alone)
        return None if self._rank else self._producer.plan

    def use_shared_weights(self, weights: SharedWeights | None) -> FrozenBytes | None:
        """Keep frozen weights in the memory of the engine on this rank's device, if there is one, and give this rank's
        own copies back to the device; see `refit.transport.one_copy`."""
        if weights is None:
            return None
        require_weights(self._model, self._phases)
        frozen = self._model.in_engine.take(weights, self._model.parameters())
        self._phases.recount()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        shared, twice = frozen.shared / 2**20, frozen.twice / 2**20
        log.info("frozen weights: %.1f MiB are the engine's, %.1f MiB are here and in the engine", shared, twice)
        return frozen

    def open_refit(self, host: str) -> tuple[int, Offer | None]:
        """Open this rank's meeting point; returns its port, and the offer for consumers."""
        self._open_producer = self._producer.open(host)
        return self._open_producer.store.port, self._open_producer.offer

    def join_refit(self) -> None:
        """See `OpenProducer.join`."""
        self._sender = self._open_producer.join()

    def send_weights(self) -> RefitReport | None:
        """Send the current weights to this rank's consumers, if it has any."""
        with self._memory.phase("refit"):
            require_weights(self._model, self._phases)
            return self._sender.send()

    def begin_save(self, folder: str) -> None:
        """See `PolicyState.begin_save`."""
        self._phases.arrive(Component.OPTIMIZER_STATES)
        require_weights(self._model, self._phases)
        self._model.in_engine.check()
        self._state.begin_save(Path(folder))

    def save_is_written(self) -> bool:
        """See `PolicyState.is_written`."""
        return self._state.is_written()

    def finish_save(self) -> dict[str, str]:
        """See `PolicyState.finish_save`."""
        return self._state.finish_save()

    def load(self, folder: str) -> None:
        """See `PolicyState.load`."""
        self._phases.enter(Phase.TRAIN)
        self._model.gather.complete()
        self._state.load(Path(folder))
        self._phases.recount()

    def export_hf(self, path: str) -> None:
        """Write the model with its configuration and tokenizer in Hugging Face format to the folder `path`."""
        require_weights(self._model, self._phases)
        self._model.in_engine.check()
        export_folder(self._model, self._rank, self._model_path, Path(path))

    def close(self) -> None:
        """Drop the model with all that belongs to it. This process may then build another worker. Collective."""
        leftovers.forget(self._model)
        disconnect(self._model)
        self.__dict__.clear()
        leave_groups()

    def _leave_training(self, phase: Phase, working_bytes: int | None = None) -> None:
        """Enter another phase, with whole weights, because they may move, and without what passes left behind."""
        self._model.gather.complete()
        leftovers.forget(self._model)
        self._phases.enter(phase, working_bytes)
