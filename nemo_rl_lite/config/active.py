"""Find the keys without effect in a run, by the `ActiveIf` metadata of the schema."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Annotated, get_args, get_origin, get_type_hints

from nemo_rl_lite.config.algorithms import algorithm_of, compares, generates, has_teacher
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_types import ActiveIf
from nemo_rl_lite.config.sizes import batch_mode, has_endpoint, on_gpus, parallel_dims, validates

FACTS: dict[str, Callable[[Config], object]] = {
    "an algorithm that generates": generates,
    "a teacher": has_teacher,
    "an endpoint": has_endpoint,
    "validations": validates,
    "GPUs": on_gpus,
    "CPUs": lambda config: not on_gpus(config),
    "data-parallel ranks": lambda config: parallel_dims(config).dense_dp > 1,
    "batches": lambda config: batch_mode(config.policy, on_gpus(config)),
    # The row of the algorithm names a constant of `data.formats`.
    "as data": lambda config: algorithm_of(config).data.rpartition(".")[2].lower(),
    "phases without the optimizer": lambda config: generates(config) or compares(config) or validates(config),
}
"""What `ActiveIf` may name besides keys."""
# Groups without a section of their own, and a key that their files set.
_GROUPS = {"offload": "policy.offload_for_generation"}


def idle_note(config: Config, given: Sequence[str]) -> str:
    """Return one line that names the keys of `given` without an effect in this run; empty if there are none."""
    idle = [f"{key} (needs {condition})" for key in given if (condition := unmet(config, key))]
    return f"no effect in this run: {', '.join(idle)}" if idle else ""


def unmet(config: Config, key: str) -> str:
    """Return what a key needs in order to have an effect in this run; empty if it has one."""
    for section, condition in _conditions(config, _GROUPS.get(key, key)):
        name = f"{section}{condition.key}" if condition.key.startswith(".") else condition.key
        # A section's own switch always has an effect.
        is_switch = f"{name}.".startswith(f"{key}.")
        value = FACTS[name](config) if name in FACTS else attrgetter(name)(config)
        if not is_switch and not condition.holds(value):
            if name in FACTS:
                return " ".join([" or ".join(map(str, condition.values)), name]).strip()
            return str(condition).replace(condition.key, name, 1)
    return ""


def _conditions(config: Config, key: str) -> Iterator[tuple[str, ActiveIf]]:
    """Yield the conditions of a key and of the sections above it, each with the section that it stands in."""
    node: object = config
    section: list[str] = []
    for name in key.split("."):
        if not is_dataclass(node):
            return
        hint = get_type_hints(type(node), include_extras=True).get(name)
        if get_origin(hint) is Annotated:
            yield from ((".".join(section), one) for one in get_args(hint)[1:] if isinstance(one, ActiveIf))
        node = getattr(node, name, None)
        section.append(name)
