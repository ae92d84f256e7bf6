"""Types, ranges and patterns that the keys of several sections have."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

PositiveInt = Annotated[int, Field(gt=0)]
# The range that numpy accepts, and therefore vLLM.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# A time that a process or a phase needs at least.
Seconds = Annotated[float, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
# A dotted path, or a file and a name in it.
USER_CODE = r"^(\w+(\.\w+)+|.+\.py:\w+)$"
DURATION = r"^(\d+:){1,3}\d{1,2}$"
# The name is part of a path, so it must not lead to another folder.
RUN_NAME = r"^[^./\\\s][^/\\]{0,199}$"
UserCode = Annotated[str, Field(pattern=USER_CODE)]
# `auto`: what fits the GPUs decides when the run starts (`config.automatic`); for `algorithm.oversample`, see
# `rollout.collector`.
Auto = Literal["auto"]
