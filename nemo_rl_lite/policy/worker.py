"""Policy on one rank: passes, optimizer steps, refits and saves. `cluster/` hosts it in an actor."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.checkpoint.store import Part
from nemo_rl_lite.compat import transformer_engine
from nemo_rl_lite.compat.megatron import auto_bridge, hide_wandb
from nemo_rl_lite.config.schema import ClusterConfig, PolicyConfig, RefitConfig
from nemo_rl_lite.losses.batch import Batch, RoutedExperts, TokenRow, TokenRows
from nemo_rl_lite.losses.grpo import mismatch_metrics
from nemo_rl_lite.losses.interface import Loss, Normalizers, combine_metrics, floats, loss_of
from nemo_rl_lite.models.folder import adapter_folder, base_name
from nemo_rl_lite.observability.liveness import note_progress
from nemo_rl_lite.observability.memory import MemoryMeter, Peaks
from nemo_rl_lite.observability.timer import SETUP
from nemo_rl_lite.offload.mover import Move
from nemo_rl_lite.offload.residency import Component, Phase, Residency
from nemo_rl_lite.policy import activation_offload
from nemo_rl_lite.policy.checkpoint import PolicyState
from nemo_rl_lite.policy.export import plan_refit
from nemo_rl_lite.policy.graphs import CudaRecorder, MicroBatchGraphs
from nemo_rl_lite.policy.groups import beat, begin_abort, leave_groups
from nemo_rl_lite.policy.hf_folder import export_folder, exported_adapters
from nemo_rl_lite.policy.interface import SAVED_WORK, ParallelPlace, with_scores
from nemo_rl_lite.policy.memory import (
    clear_module_caches,
    host_registrar,
    phase_memory,
    require_weights,
    return_memory,
)
from nemo_rl_lite.policy.micro_batches import Layout
from nemo_rl_lite.policy.model import build_model
from nemo_rl_lite.policy.moe import expert_biases
from nemo_rl_lite.policy.optimizer import build_optimizer, disconnect, rank_threads, take_step
from nemo_rl_lite.policy.passes import forward_backward, forward_scores, put_rows
from nemo_rl_lite.policy.reference import Reference
from nemo_rl_lite.policy.score_files import ScoreFile, ScoreWriter, Update
from nemo_rl_lite.refit.interface import RefitReport, WeightSource
from nemo_rl_lite.refit.ipc import SharedBytes, SharedWeights
from nemo_rl_lite.refit.layout import RefitPlan
from nemo_rl_lite.refit.trace import Recipe
from nemo_rl_lite.refit.windows import Piece, Transfer, WindowRoutes
from nemo_rl_lite.system import numa

__all__ = ["MegatronWorker", "beat", "preload"]
log = logging.getLogger(__name__)


def preload() -> None:
    """Import slow modules."""
    hide_wandb()
    auto_bridge()


class MegatronWorker:
    """Policy on this rank; see `interface.Policy`. The environment has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    All methods are collective. Results are None on ranks that do not report (`ParallelPlace.reports`). They contain no
    torch tensors, because unpickling them would import megatron-core.
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
        resumes: bool = False,
    ):
        """`resumes`: `load` follows, which replaces all weights except a LoRA's base model."""
        # Bind first, so that threads and pinned memory are near the GPU.
        if on_gpu and cluster.numa_binding:
            log.info("%s", numa.bind(numa.gpu_address()).describe())
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._model_path, self._rank = Path(model_path), int(os.environ["RANK"])
        self._base = base_name(policy.model_name, self._model_path)
        self._seed, self._temperature = seed, temperature
        self._weight_decay, self._max_norm = policy.megatron_cfg.optimizer.weight_decay, policy.max_grad_norm
        with SETUP("model"):
            # The reference policy begins with the model's weights.
            reads = keep_reference or policy.megatron_cfg.peft.enabled or not resumes
            self._model = build_model(policy, model_path, on_gpu, cluster.collective_timeout_s, seed, reads=reads)
        with SETUP("optimizer"):
            self._optimizer, self._scheduler = build_optimizer(policy, self._model)
        if policy.megatron_cfg.optimizer.optimizer_cpu_offload and cluster.threads_per_worker is None:
            torch.set_num_threads(rank_threads())
        self._reference = Reference(policy, self._model) if keep_reference else None
        shares = self._model.place.shares_prompts
        self._train_layout = Layout.configured(policy, "train", on_gpu, sequences_together, shares)
        self._logprob_layout = Layout.configured(policy, "logprob", on_gpu, can_share=shares)
        log.info("micro-batches: %s for training, %s for logprobs", self._train_layout, self._logprob_layout)
        self._phases = phase_memory(policy, self._model, self._optimizer, residency)
        self._memory = MemoryMeter(self._phases.device_bytes)
        self._graphs = MicroBatchGraphs(self._model, CudaRecorder()) if self._train_layout.in_buckets else None
        self._held: dict[str, Batch] = {}
        self._experts: dict[str, RoutedExperts | None] = {}
        self._updates: dict[str, list[Update]] = {}
        self._score_writer = ScoreWriter(self._model.place.data_rank)
        registrar = host_registrar(policy, self._model)
        self._state = PolicyState(self._model, self._optimizer, self._scheduler, self._reference, registrar)

    def place(self) -> ParallelPlace:
        return self._model.place

    def prepare_for_logprob(self) -> None:
        """Enter the logprob phase. Phases may follow in any order."""
        self._leave_training(Phase.LOGPROB, working_bytes=self._memory.working_bytes("logprob"))

    def prepare_for_training(self) -> None:
        """Enter the training phase. Optimizer states may arrive during its passes."""
        self._phases.enter(Phase.TRAIN, later=[Component.OPTIMIZER_STATES])

    def prepare_for_refit(self, engine_bytes: int) -> None:
        """Enter the refit phase. Offloads may overlap with an engine's allocation of `engine_bytes` on this device."""
        self._leave_training(Phase.REFIT, working_bytes=engine_bytes)

    def prepare_for_generation(self) -> None:
        """Enter the generation phase."""
        self._leave_training(Phase.GENERATE)
        self._memory.note("generate")

    def release_host_memory(self) -> None:
        """Reload all components, and free the host memory of moves and saves, at the end of a run."""
        self._leave_training(Phase.TRAIN)
        self._phases.release()
        self._state.release()

    def pop_moves(self) -> list[tuple[str, Move]]:
        """Return moves since the last call, by "<component>/to_host" or "/to_device"."""
        return self._phases.pop_moves()

    def take_passes(self) -> dict[str, list[float]]:
        """See `PassClock.take`."""
        return self._model.clock.take()

    def logprobs(self, tokens_BT: Tensor, lengths_B: Tensor, phase: str = "probe") -> np.ndarray | None:
        scored = self._scores(tokens_BT, lengths_B, phase)
        return scored["logprobs"].numpy() if scored is not None and self._model.place.reports else None

    def put_batch(self, rows: Sequence[TokenRow], name: str = "train") -> None:
        """Keep this replica's rows of a batch, padded to the longest. Routed experts are those of the rank's layers
        (`ParallelPlace.replayed_layers`), and are not padded."""
        joined = TokenRows.of(rows)
        self._held[name], self._experts[name] = Batch.padded(joined), joined.routed_experts
        self._updates[name] = []

    def put_parts(self, name: str, order: Sequence[int], scored: Sequence[np.ndarray], *parts: Any) -> None:
        """Keep this replica's rows of a batch: those at `order` in the concatenation of `parts`. The last parts are a
        teacher's scores of the rows at each of `scored`."""
        batches, scores = parts[: len(parts) - len(scored)], parts[len(parts) - len(scored) :]
        rows = TokenRows.concatenated(batches).select(order)
        self.put_batch(with_scores(rows, scored, scores) if scored else rows, name)

    def join_episodes(self, tokens: np.ndarray, fillers: list[int], name: str = "train") -> None:
        """Note that rows of a held batch belong to the same episodes: `tokens` is `Batch.episode_tokens`. The rows at
        `fillers` lose their loss, and all tokens but the first."""
        batch, experts = self._held[name].without_loss(fillers), self._experts[name]
        self._held[name] = replace(batch, episode_tokens=torch.tensor(tokens, dtype=torch.float32))
        if experts is not None:
            self._experts[name] = experts.cut(batch.lengths.numpy())

    def score(
        self, which: Sequence[str], counts: Normalizers, name: str = "train", first: int = 0
    ) -> dict[str, float] | None:
        """Add `previous` (from the row `first`) and `reference` logprobs to a held batch. Returns this replica's share
        of `mismatch_metrics`, if engines sampled the rows and they have previous logprobs."""
        batch, measured = self._held[name], {}
        if "previous" in which:
            rows, previous_BT = slice(first, None), torch.zeros(batch.tokens.shape)
            scored_BT = self._pass_logprobs(name, rows, then_train="reference" not in which)
            if scored_BT is not None:
                previous_BT[first:] = scored_BT
                batch = replace(batch, previous_logprobs=previous_BT)
                if batch.generation_logprobs is not None:
                    measured = mismatch_metrics(batch.rows(rows), counts)
        if "reference" in which:
            if self._reference is None:
                raise RuntimeError("the worker was started without reference weights (keep_reference)")
            require_weights(self._model, self._phases)
            with self._reference.in_place():
                batch = replace(batch, reference_logprobs=self._pass_logprobs(name, then_train=True))
        self._held[name] = batch
        return floats([measured])[0] if self._model.place.reports else None

    def evaluate(self, rows: int, loss: Loss, counts: Normalizers, name: str = "train") -> dict[str, float] | None:
        """Return loss and metrics of the first `rows` rows of a held batch, without a gradient; None without rows."""
        batch = self._held[name]
        scored = self._scores(batch.tokens, batch.lengths, then_train=self._reference is None, loss=loss)
        if scored is None or not rows or not self._model.place.reports:
            return None
        logprobs_BT = scored.pop("logprobs")
        with torch.no_grad():
            _, metrics = loss_of(loss, logprobs_BT[:rows], replace(batch, **scored).rows(slice(rows)), counts)
        return floats([metrics])[0]

    def train(
        self,
        loss: Loss,
        counts: Normalizers,
        rows: slice = slice(None),
        name: str = "train",
        mismatch_counts: Normalizers | None = None,
    ) -> tuple[dict[str, float], dict[str, float]] | None:
        """Take one optimizer step on `rows` of a held batch, this replica's rows of a global batch.

        Returns this replica's share of the step's and the mismatch's metrics (`mismatch_counts`: see
        `forward_backward`). If it measures the mismatch, the batch gets its logprobs as previous ones. `grad_norm`,
        `lr`, `wd` and `skipped_steps` are equal on all replicas. If the gradients' norm is not finite, nothing is
        updated: `skipped_steps` is 1 and `grad_norm` is NaN.
        """
        self._phases.require(Component.PARAMETERS)
        self._phases.expect(Component.OPTIMIZER_STATES)
        self._seed_step()
        batch = self._held[name].rows(rows)
        with self._memory.phase("train"), self._phases.gradients.accumulating():
            for chunk in self._model.chunks:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            biases = expert_biases(self._model.chunks)
            before = [bias.clone() for bias in biases]
            eager = partial(forward_backward, self._model, experts=self._experts_of(name, rows))
            run = eager if self._graphs is None else self._graphs.forward_backward
            parts = run(batch, self._train_layout, self._temperature, loss, counts, mismatch_counts)
            self._model.clock.keep("train")
            self._phases.arrive(Component.OPTIMIZER_STATES)
            self._model.gather.mark_stale()
            learning_rate = self._optimizer.param_groups[0]["lr"]
            grad_norm = take_step(self._optimizer, self._max_norm)
            if finite := math.isfinite(grad_norm):
                self._scheduler.step(increment=1)
                if self._scheduler.num_steps == 1:
                    # The first step may have made states.
                    self._phases.recount()
            else:
                grad_norm = math.nan
                # megatron-core has already updated them.
                for bias, value in zip(biases, before, strict=True):
                    bias.copy_(value)
        if not self._model.place.reports:
            return None
        # Scores of samples are written to files, or are the previous logprobs of later steps.
        is_kept = batch.generation_logprobs is not None or mismatch_counts is not None
        scores = [
            {name: one.to("cpu", non_blocking=True) for name, one in part.scores.items()} if is_kept else {}
            for part in parts
        ]
        measured = [{"grad_norm": torch.as_tensor(grad_norm)}, *(part.metrics for part in parts)]
        norm, *each = floats([*measured, *(part.mismatch for part in parts)])
        if is_kept:
            # `floats` has waited for the copies.
            update = _update(rows, batch.tokens.shape, [part.rows for part in parts], scores, is_skipped=not finite)
            if batch.generation_logprobs is not None:
                self._updates[name].append(update)
            if mismatch_counts is not None:
                self._keep_previous(name, update)
        shares, mismatch = combine_metrics(each[: len(parts)]), combine_metrics(each[len(parts) :])
        own = {"lr": learning_rate, "wd": self._weight_decay, "skipped_steps": float(not finite)}
        saved = sum(part.saved for part in parts)
        return shares | norm | own | ({SAVED_WORK: saved} if saved else {}), mismatch

    def write_scores(self, places: np.ndarray, target: ScoreFile, loss: Loss, name: str = "train") -> None:
        """Start to write the scores of a batch with previous logprobs; see `ScoreWriter.write`."""
        if self._model.place.reports:
            self._score_writer.write(target, places, self._held[name], self._updates[name], loss)

    def scores_written(self) -> list[str]:
        """See `ScoreWriter.written`."""
        return self._score_writer.written()

    def follow_policy(self, share: float) -> None:
        """Move the reference policy's weights towards the policy's; see `Reference.follow`."""
        if self._reference is None:
            raise RuntimeError("the worker was started without reference weights (keep_reference)")
        require_weights(self._model, self._phases)
        self._reference.follow(share)

    def pop_memory(self) -> Peaks:
        """Return peak memory by phase since the last call; empty on a CPU."""
        return self._memory.take()

    def plan_refit(
        self, config: RefitConfig, shared_device: bool, consumers: int, adapters_alone: bool = False
    ) -> RefitPlan | None:
        """See `export.plan_refit`; rank 0 returns the plan."""
        require_weights(self._model, self._phases)
        self._producer = plan_refit(self._model, config, shared_device, consumers, adapters_alone)
        return None if self._rank else self._producer.plan

    def use_shared_weights(self, weights: SharedWeights | None) -> SharedBytes | None:
        """Replace frozen weights with those of the engine on this device, if any; see `SharedFrozenParams`."""
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

    def open_refit(self, host: str) -> tuple[int, WeightSource | None]:
        """Open this rank's rendezvous. Returns its port, and the weight source for consumers."""
        self._store, self._offer = self._producer.open(host)
        return self._store.port, self._offer

    def join_refit(self, consumers: int) -> None:
        self._leave_refit()
        self._sender = self._producer.join(self._store, self._offer, consumers)

    def refit_recipe(self) -> Recipe | None:
        """Return, from rank 0, the windows that fill each exported tensor; None if the ranks cannot send windows."""
        windows = self._producer.windows
        return None if self._rank or windows is None else windows.recipe

    def route_windows(self, needs: Mapping[int, Sequence[Piece]]) -> list[Transfer]:
        """See `windows.route`; only on rank 0."""
        return self._producer.require_windows().route(needs)

    def join_windows(self, routes: WindowRoutes) -> RefitReport | None:
        """Join the receivers of this rank's windows, and send the current weights to be compared."""
        require_weights(self._model, self._phases)
        self._leave_refit()
        self._sender = self._producer.require_windows().join(routes)
        return self._sender.send()

    def _leave_refit(self) -> None:
        """Free the groups and buckets of an earlier connection before the next one allocates its own."""
        vars(self).pop("_sender", None)

    def send_weights(self) -> RefitReport | None:
        with self._memory.phase("refit"):
            require_weights(self._model, self._phases)
            return self._sender.send()

    def begin_save(self, folder: str) -> None:
        self._phases.arrive(Component.OPTIMIZER_STATES)
        require_weights(self._model, self._phases)
        self._model.in_engine.check()
        self._state.begin_save(Path(folder))

    def save_is_written(self) -> bool:
        return self._state.is_written()

    def finish_save(self) -> dict[str, list[Part]]:
        return self._state.finish_save()

    def load(self, folder: str) -> None:
        self._phases.enter(Phase.TRAIN)
        self._model.gather.complete()
        self._state.load(Path(folder))
        self._phases.recount()

    def export_hf(self, path: str) -> None:
        """Write the model in Hugging Face format to the folder `path`, and LoRA's adapters in PEFT's format to
        `adapter_folder(path)`."""
        require_weights(self._model, self._phases)
        self._model.in_engine.check()
        target = Path(path)
        export_folder(self._model, self._rank, self._model_path, target)
        if self._model.lora is not None:
            folder = adapter_folder(target)
            with exported_adapters(self._model, self._rank, self._base, self._model_path, folder):
                pass

    def close(self, is_rank_lost: bool = False) -> None:
        """Drop the model, so that this process can build another worker. Not collective if a rank is lost. Raises
        RuntimeError: this process's GPU has failed, or its memory stays in use."""
        aborts = begin_abort() if is_rank_lost else []
        on_gpu, in_engine = self._model.device.type == "cuda", self._model.in_engine
        clear_module_caches(self._model)
        activation_offload.forget_pass(self._model.chunks)
        disconnect(self._model)
        self.__dict__.clear()
        leave_groups(aborts)
        if on_gpu:
            transformer_engine.forget_groups()
            return_memory()
        # Kernels may have read it until now.
        in_engine.close()

    def _keep_previous(self, name: str, update: Update) -> None:
        """Add the logprobs of an update's pass to a held batch, as previous ones."""
        batch = self._held[name]
        previous_BT = torch.zeros(batch.tokens.shape) if batch.previous_logprobs is None else batch.previous_logprobs
        previous_BT[update.rows] = update.scores["logprobs"]
        self._held[name] = replace(batch, previous_logprobs=previous_BT)

    def _experts_of(self, name: str, rows: slice) -> RoutedExperts | None:
        experts = self._experts[name]
        return None if experts is None else experts.rows(rows)

    def _pass_logprobs(self, name: str, rows: slice = slice(None), *, then_train: bool) -> Tensor | None:
        batch, experts = self._held[name].rows(rows), self._experts_of(name, rows)
        scored = self._scores(batch.tokens, batch.lengths, then_train=then_train, experts=experts)
        self._model.clock.keep("logprob")
        return None if scored is None else scored["logprobs"]

    def _scores(
        self,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        phase: str = "logprob",
        then_train: bool = False,
        loss: Loss | None = None,
        experts: RoutedExperts | None = None,
    ) -> dict[str, Tensor] | None:
        """See `forward_scores`. `then_train`: training follows, so its components may be reloaded meanwhile."""
        require_weights(self._model, self._phases)
        working_bytes = self._memory.working_bytes(phase) if then_train else None
        between = self._phases.between_micro_batches(Phase.TRAIN, working_bytes, self._memory.moving)
        layout, temperature = self._logprob_layout, self._temperature
        with self._memory.phase(phase):
            inputs = tokens_BT, lengths_B, layout, temperature
            return forward_scores(self._model, *inputs, between, loss, experts)

    def _seed_step(self) -> None:
        """Seed random numbers, such as dropout's, by run, step and rank; context-parallel ranks differ too."""
        steps, context = self._scheduler.num_steps, self._model.context
        replica = self._model.place.data_rank * context.size + context.rank
        note_progress(optimizer_step=steps + 1, micro_batch=0)
        torch.manual_seed((self._seed * 1_000_003 + steps) * 65_537 + replica)

    def _leave_training(self, phase: Phase, working_bytes: int | None = None) -> None:
        """Enter a different phase with complete weights, which may move, and without cached tensors."""
        self._model.gather.complete()
        clear_module_caches(self._model)
        self._phases.enter(phase, working_bytes)


def _update(
    rows: slice,
    shape_BT: torch.Size,
    places: Sequence[Tensor],
    scores: Sequence[dict[str, Tensor]],
    is_skipped: bool,
) -> Update:
    """Lay out what the micro-batches' passes computed. `places`: indices of each micro-batch's rows among `rows`."""
    whole = {name: torch.zeros(shape_BT) for name in scores[0]}
    micro_batches = torch.empty(shape_BT[0], dtype=torch.int32)
    for number, (own, found) in enumerate(zip(places, scores, strict=True)):
        micro_batches[own] = number
        for name, values_bT in found.items():
            put_rows(whole[name], own, values_bT)
    return Update(rows, micro_batches, whole, is_skipped)
