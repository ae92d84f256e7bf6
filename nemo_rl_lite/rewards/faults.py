"""Errors in the code of a user's reward that do not depend on the response, such as a misspelt name."""

import builtins
import dis
import re
from pathlib import Path
from types import ModuleType, TracebackType

from nemo_rl_lite.system.pool import is_users

_ARITY = re.compile(
    r"(?P<name>\w+)\S*\(\) (missing \d+ required|got an unexpected keyword|got multiple values|takes .* argument)|"
    r"(?P<other>\w+) expected .* arguments?, got"
)


def is_fault(error: BaseException) -> bool:
    """Return True for an unknown name, module or attribute, or a call with wrong arguments, that the user's code itself
    spells out. Code that a response brings, values that it decides and objects that it makes do not count."""
    places = [place for place in _places(error.__traceback__) if is_users(place.tb_frame.f_code.co_filename)]
    *_, last = [None, *_places(error.__traceback__)]
    if last is None or not places or not _is_beside(last, places[0]):
        return False
    opcode = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    if isinstance(error, ImportError):
        return True
    if isinstance(error, NameError):
        # Not a local variable that some branch has not set.
        return type(error) is NameError and str(error).startswith("name ")
    if isinstance(error, AttributeError) and opcode == "LOAD_ATTR":
        return isinstance(error.obj, ModuleType) or (last is places[0] and _is_of_parameter(last, error.obj))
    if isinstance(error, TypeError) and opcode != "CALL_FUNCTION_EX" and (found := _ARITY.match(str(error))):
        name = found["name"] or found["other"]
        return name in last.tb_frame.f_globals or hasattr(builtins, name)
    return False


def _places(place: TracebackType | None) -> list[TracebackType]:
    found = []
    while place is not None:
        found.append(place)
        place = place.tb_next
    return found


def _is_beside(place: TracebackType, reward: TracebackType) -> bool:
    """Return True in the reward's own file or notebook cell, or another file of its folder."""
    file, own = (Path(one.tb_frame.f_code.co_filename) for one in (place, reward))
    return (file == own and file.is_absolute()) or (file.parent == own.parent and file.is_file())


def _is_of_parameter(place: TracebackType, value: object) -> bool:
    """Return True if the attribute is read from a parameter of the reward, whose type no response decides."""
    code = place.tb_frame.f_code
    instructions = [*dis.get_instructions(code)]
    at = next(index for index, one in enumerate(instructions) if one.offset == place.tb_lasti)
    before, stored = instructions[at - 1], {one.argval for one in instructions if one.opname.startswith("STORE_FAST")}
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return (
        value is not None
        and before.opname.startswith("LOAD_FAST")
        and before.argval in parameters
        and before.argval not in stored
    )
