"""One policy rank without Ray that counts how often its training steps read a tensor, for which a GPU would be waited.

sync_rank.py MODEL_FOLDER CASES, a JSON object of overrides by case. Writes a JSON object to standard output: for each
case the reads of a training step, by where they come from.
"""

import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.policy.worker import MegatronWorker
from tests.functional.rank import policies

# What torch calls where a value (`item`, `float`, `bool`, `int`) or the size of a result must be known on the host.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")
# Copies to the host, which are no operations where tensors are on it already.
COPIES = ("tolist", "cpu", "numpy")
# megatron-core compares the states of random numbers around attention; they are on the host also where it uses a GPU.
ON_HOST = "random.py"


class Reads(TorchDispatchMode):
    """Counts what reads tensors within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in func.__name__ for name in READS) or (func.__name__.startswith("index") and _is_boolean(args)):
            self.count(func.__name__)
        return func(*args, **(kwargs or {}))

    def count(self, what: str) -> None:
        if self.counting:
            frames = [frame for frame in traceback.extract_stack() if __file__ not in frame.filename]
            own = next(
                (frame for frame in reversed(frames) if "site-packages/torch/" not in frame.filename), frames[-1]
            )
            if Path(own.filename).name != ON_HOST:
                self.found[f"{what} {Path(own.filename).name}:{own.lineno} {own.line}"] += 1

    @contextmanager
    def pausing(self) -> Iterator[None]:
        self.counting = False
        yield
        self.counting = True


def _is_boolean(args: Any) -> bool:
    indices = [one for own in args if isinstance(own, list) for one in own if one is not None]
    return any(one.dtype is torch.bool for one in indices)


class Copies(TorchFunctionMode):
    """Counts copies to the host within the block."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in COPIES:
            self._reads.count(func.__name__)
        return func(*args, **(kwargs or {}))


def main(model_folder: str, cases: str) -> None:
    check_that_reads_are_seen()
    found = {
        name: reads_of(config, worker) for name, config, worker in policies(model_folder, cases, keep_reference=False)
    }
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()


def check_that_reads_are_seen() -> None:
    reads, values = Reads(), torch.arange(3.0)
    with Copies(reads), reads:
        read = float(values[1]), bool(values[0] > 1), values[values > 0], values.tolist(), values.sum().item()
    assert len(read) == reads.found.total() == 5, reads.found


def reads_of(config: Config, worker: MegatronWorker) -> dict[str, int]:
    source = torch.Generator().manual_seed(1)
    lengths = torch.randint(7, 13, (16,), generator=source).tolist()
    rows = [
        TokenRow([4 + place for place in range(own)], [place > 4 for place in range(own)], [-1.0] * own, 0.5, [1] * own)
        for own in lengths
    ]
    loss = GRPOLoss(config.options(GRPOConfig).loss_fn)
    worker.put_batch(rows)
    worker.prepare_for_training()
    counts, reads = loss.counts(rows), Reads()
    step = worker._optimizer.step_with_ready_grads

    def paused() -> Any:
        with reads.pausing():
            return step()

    # On a CPU megatron-core steps with torch's optimizer, which reads the number of steps of each parameter.
    worker._optimizer.step_with_ready_grads = paused
    for _ in range(2):
        reads.found.clear()
        with Copies(reads), reads:
            worker.train(loss, counts, mismatch_counts=counts)
    return dict(reads.found)


if __name__ == "__main__":
    main(*sys.argv[1:])
