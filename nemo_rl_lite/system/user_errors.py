"""Describe errors of a user's code: one short line, the place in the user's file, and whether the code itself is wrong.

A fault is an error that depends on no response, such as a misspelt name.
"""

import builtins
import dis
import os
import re
import sys
import threading
import traceback
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, TracebackType

from nemo_rl_lite.errors import printable

_LONGEST_ERROR = 300
# Folders of this package and of Python itself, which are not a user's code.
_PACKAGE, _PYTHON = f"{Path(__file__).resolve().parents[1]}{os.sep}", f"{Path(threading.__file__).parent}{os.sep}"
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_ARITY = re.compile(
    r"(?P<name>\w+)\S*\(\) (missing \d+ required|got an unexpected keyword|got multiple values|takes .* argument)|"
    r"(?P<other>\w+) expected .* arguments?, got"
)
# Places in a user's code whose errors have been printed, and the most of them.
_reported: set[tuple[str, str, str]] = set()
_MOST_REPORTED = 100


class CallError(Exception):
    """A call has no result: the code raised, exceeded its time limit, or its process ended."""

    def __init__(self, message: str, details: str = "", place: str = "", is_fault: bool = False):
        """`details`: the traceback; `place`: see `place_of`; `is_fault`: see `is_fault`."""
        super().__init__(message)
        self.details, self.place, self.is_fault = details, place, is_fault


def as_call_error(error: BaseException) -> CallError:
    """Describe a user's error in one short line; some errors quote a whole response."""
    text = f"{type(error).__name__}: {error}"
    short = text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
    return CallError(short, "".join(traceback.format_exception(error)), place_of(error), is_fault(error))


def place_of(error: BaseException) -> str:
    """Return the last line of the user's file in an error's traceback, as " (FILE, line N)"; "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def report_once(what: str, error: BaseException) -> None:
    """Print a user's error, once per place in the code."""
    described = as_call_error(error)
    place = (what, type(error).__name__, described.place)
    if place not in _reported and len(_reported) < _MOST_REPORTED:
        _reported.add(place)
        # The text may quote a response.
        sys.stderr.write(f"{what}: {printable(described)}{described.place}\n")


def is_fault(error: BaseException) -> bool:
    """Return True for an unknown name, module or attribute, or a call with wrong arguments, in the user's own code.

    Code that a response brings, values that it decides and objects that it makes do not count.
    """
    places = [place for place in _places(error.__traceback__) if _is_users(place.tb_frame.f_code.co_filename)]
    *_, last = [None, *_places(error.__traceback__)]
    if last is None or not places or not _is_beside(last, places[0]):
        return False
    opcode = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    if isinstance(error, ImportError):
        return True
    if isinstance(error, NameError):
        # A local variable that some branch has not set may depend on the response.
        return type(error) is NameError and str(error).startswith("name ")
    if isinstance(error, AttributeError) and opcode == "LOAD_ATTR":
        is_own = (
            last is places[0] and _is_of_parameter(last, error.obj) and not _sets(type(error.obj), error.name or "")
        )
        return isinstance(error.obj, ModuleType) or is_own
    if isinstance(error, TypeError) and opcode != "CALL_FUNCTION_EX" and (found := _ARITY.match(str(error))):
        name = found["name"] or found["other"]
        return name in last.tb_frame.f_globals or hasattr(builtins, name)
    return False


def _is_users(file: str) -> bool:
    """Return True for a file of neither this package nor Python itself."""
    return not file.startswith((_PACKAGE, "<frozen ")) and (not file.startswith(_PYTHON) or _INSTALLED in file)


def _places(place: TracebackType | None) -> list[TracebackType]:
    found = []
    while place is not None:
        found.append(place)
        place = place.tb_next
    return found


def _is_beside(place: TracebackType, first: TracebackType) -> bool:
    """Return True in the file or notebook cell of the `first` place, or another file of its folder."""
    file, own = (Path(one.tb_frame.f_code.co_filename) for one in (place, first))
    return (file == own and file.is_absolute()) or (file.parent == own.parent and file.is_file())


def _is_of_parameter(place: TracebackType, value: object) -> bool:
    """Return True if the attribute is read from a parameter of the function, whose type no response decides."""
    code = place.tb_frame.f_code
    instructions = [*dis.get_instructions(code)]
    at = next(index for index, one in enumerate(instructions) if one.offset == place.tb_lasti)
    before = instructions[at - 1]
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return (
        value is not None
        and before.opname.startswith("LOAD_FAST")
        and before.argval in parameters
        and before.argval not in _stored(code, "STORE_FAST")
    )


def _sets(kind: type, name: str) -> bool:
    """Return True if a method of a class sets the attribute, perhaps in a branch that was not taken."""
    methods = [one for owner in kind.__mro__ for one in vars(owner).values() if isinstance(one, FunctionType)]
    return any(name in _stored(method.__code__, "STORE_ATTR") for method in methods)


def _stored(code: CodeType, operation: str) -> set[str]:
    """Return the names that a function stores by an operation such as STORE_FAST."""
    return {one.argval for one in dis.get_instructions(code) if one.opname.startswith(operation)}
