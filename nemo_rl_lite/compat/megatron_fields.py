"""Fields of megatron-bridge's model providers, read from the installed sources without importing them."""

import ast
import json
import typing
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from nemo_rl_lite.compat.versions import written_for

written_for(__name__, "megatron-core", "0.19")
written_for(__name__, "megatron-bridge", "0.6")

# Classes of providers: megatron-core's options, and those that megatron-bridge adds for single models.
_SOURCES = ("core/model_parallel_config.py", "core/transformer/transformer_config.py", "bridge/models/**/*provider*.py")


@cache
def provider_fields() -> dict[str, list[str]]:
    """Map the fields of all providers to their annotations; empty if megatron is not installed."""
    found: dict[str, list[str]] = {}
    for file in _files():
        for defined in ast.parse(file.read_text()).body:
            for one in defined.body if isinstance(defined, ast.ClassDef) else ():
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    found.setdefault(one.target.id, []).append(ast.unparse(one.annotation))
    return found


def field_value(name: str, value: object) -> Any:
    """Return a configuration's value for a field, in the field's type.

    Raises:
        ValueError: the field has another type, or one that a configuration cannot express.
    """
    rule = "has a type that a configuration cannot express"
    for annotation in dict.fromkeys(provider_fields()[name]):
        try:
            kind = eval(annotation, dict(vars(typing)))  # noqa: S307  # source text of installed packages
            # JSON has lists for tuples, too.
            return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            rule = error.errors()[0]["msg"].replace("Input should be", "must be")
        # The type is a class of torch or megatron-core.
        except (NameError, PydanticUserError):
            continue
    raise ValueError(rule)


def _files() -> Iterator[Path]:
    spec = find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec else ():
        for pattern in _SOURCES:
            yield from sorted(Path(folder).glob(pattern))
