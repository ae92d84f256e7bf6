"""The residency table with predicted bytes, as rows of text."""

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus, policy_ranks
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.offload.residency import Place, Residency
from nemo_rl_lite.planning.model_size import parameter_count
from nemo_rl_lite.planning.prediction import Bytes, Prediction, totals

GIB, MIB = 2**30, 2**20
NOTHING = "-"


def title(config: Config, shape: ModelShape, device_bytes: int | None) -> str:
    """The table's title: which rank, which device, which model."""
    ranks = policy_ranks(config)
    whose = "the policy rank" if ranks == 1 else f"the fullest of {ranks} policy ranks"
    device = "a CPU" if not on_gpus(config) else "a GPU" if device_bytes is None else f"a GPU of {size(device_bytes)}"
    model = f"{config.policy.model_name} ({parameter_count(shape) / 1e6:,.0f} M parameters)"
    return f"predicted memory of {whose} on {device}: {model}"


def headers(residency: Residency) -> list[str]:
    """The table's column headers: one per phase."""
    return ["", *(phase.value for phase in residency.phases)]


def render(residency: Residency, prediction: Prediction) -> list[list[str]]:
    """The table's rows: each component's bytes and places by phase, then sums."""
    rows = [
        [
            component.value.replace("_", " "),
            *(_cell(residency.place(phase, component), prediction[phase, component]) for phase in residency.phases),
        ]
        for component in residency.components
    ]
    sums = totals(prediction)
    return [
        *rows,
        ["sum on the device", *(_sum(sums[phase].device) for phase in residency.phases)],
        ["sum on the host", *(_sum(sums[phase].host) for phase in residency.phases)],
    ]


def size(nbytes: int) -> str:
    """`12.3 GiB`, or `513 MiB` below one."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def _cell(place: Place, nbytes: Bytes) -> str:
    """One line for each place that holds a part of the component; only the place if it holds 0 bytes."""
    if place is Place.RELEASED:
        return NOTHING
    parts = [(Place.DEVICE, nbytes.device), (Place.HOST, nbytes.host)]
    return "\n".join(f"{size(part)} {where}" for where, part in parts if part or where is place)


def _sum(nbytes: int) -> str:
    return size(nbytes) if nbytes else NOTHING
