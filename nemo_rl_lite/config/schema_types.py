"""Types, ranges and patterns that several sections of the schema share, and when a key has an effect."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
PositiveInt = Annotated[int, Field(gt=0)]
# The range that numpy accepts, and therefore vLLM.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# A limit that leaves a process or a phase time to work.
Seconds = Annotated[float, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
# A dotted path, or a file and a name in it.
USER_CODE = r"^(\w+(\.\w+)+|.+\.py:\w+)$"
DURATION = r"^(\d+:){1,3}\d{1,2}$"
# The name is part of a path, so it must not lead to another folder.
RUN_NAME = r"^[^./\\\s][^/\\]{0,199}$"
# For a list: null is an empty one.
NullIsEmpty = BeforeValidator(lambda value: [] if value is None else value)
# For a limit: vLLM, verl and TRL write 0 or -1 for none.
NoneIsOff = BeforeValidator(lambda value: None if value in (0, -1) else value)
UserCode = Annotated[str, Field(pattern=USER_CODE)]
# `planning.automatic` resolves it when the run starts; for `algorithm.oversample`, see `rollout.collector`.
Auto = Literal["auto"]


class ActiveIf:
    """Metadata of a key or section that has an effect only under a condition. Several must all hold.

    `key` is another key, a key of the same section (`.name`), or a fact of `config.active.FACTS`. The condition holds
    with one of `values`; without values, if the key is set, true, and larger than `above`.
    """

    def __init__(self, key: str, *values: object, above: int = 0):
        self.key, self.values, self.above = key, values, above

    def holds(self, value: object) -> bool:
        """Return whether the condition holds, given the value of `key`."""
        if self.values:
            return value in self.values
        return value > self.above if isinstance(value, int | float) else bool(value)

    def __str__(self) -> str:
        if self.values:
            return f"{self.key}={' or '.join('null' if one is None else str(one).lower() for one in self.values)}"
        return f"{self.key}>{self.above}" if self.above else self.key
