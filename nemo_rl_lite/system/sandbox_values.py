"""Exchange values and calls between a program and its tests, two processes of a sandbox. Imports nothing of this
package.

Values of Python's own types, and of the types in `_VALUES`, are copied. For other objects the other side gets a
stand-in, which forwards attributes and operators. A stand-in never lets the program compare its object with a value of
the tests. The program would learn the expected value, and could return any result.
"""

import builtins
import collections
import collections.abc
import copy
import datetime
import decimal
import fractions
import io
import json
import socket
import struct
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_ATOMS = frozenset({type(None), bool, int, float, str})
_ITEMS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Copied types: functions that take a value apart and that make it.
_VALUES: dict[type, tuple[Callable, Callable]] = {
    dict: (lambda value: [list(value.items())], dict),
    bytes: (lambda value: [value.hex()], bytes.fromhex),
    bytearray: (lambda value: [value.hex()], bytearray.fromhex),
    complex: (lambda value: [value.real, value.imag], complex),
    range: (lambda value: [value.start, value.stop, value.step], range),
    slice: (lambda value: [value.start, value.stop, value.step], slice),
    type(...): (lambda value: [], lambda: ...),
    type(NotImplemented): (lambda value: [], lambda: NotImplemented),
    collections.Counter: (lambda value: [dict(value)], collections.Counter),
    collections.OrderedDict: (lambda value: [list(value.items())], collections.OrderedDict),
    collections.defaultdict: (lambda value: [value.default_factory, dict(value)], collections.defaultdict),
    collections.deque: (lambda value: [list(value), value.maxlen], collections.deque),
    decimal.Decimal: (lambda value: [str(value)], decimal.Decimal),
    fractions.Fraction: (lambda value: [value.numerator, value.denominator], fractions.Fraction),
} | {
    one: (lambda value: list(value.__reduce__()[1]), one)
    for one in (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)
}
_BY_NAME = {one.__qualname__: one for one in _VALUES}
_FIXED = (int, float, complex, str, bytes, tuple, frozenset)
_MUTABLE = (list, dict, set, bytearray, collections.deque)
_CLASSES = {
    name: one
    for name, one in vars(builtins).items()
    if isinstance(one, type)
    and (issubclass(one, BaseException) or one in {*_VALUES, *_ATOMS, *_FIXED, *_MUTABLE, object})
} | _BY_NAME
_COMPARE = frozenset({"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"})
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
_ARITHMETIC = frozenset(f"__{kind}{name}__" for name in _BINARY.split() for kind in ("", "r", "i"))
_UNARY = "neg pos abs invert int float complex index bool round trunc floor ceil str repr format bytes hash"
_PROTOCOLS = "call len length_hint iter next reversed getitem setitem delitem contains enter exit"
_OTHERS = frozenset(f"__{name}__" for name in f"{_UNARY} {_PROTOCOLS}".split())
_COMPARING = {"math": "math", "cmath": "cmath", "np": "numpy", "numpy": "numpy"}
_LENGTH = struct.Struct("!I")
_LONGEST = 2**28
_HIDDEN = "_stand_in"


class StandInClass(type):
    """The class of stand-in classes. A call creates the object on the other side."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = _of(cls).call(cls, args, kwargs)
        if isinstance(made, StandIn):
            object.__setattr__(made, "_is_made_here", True)
        return made

    def __getattr__(cls, name: str) -> Any:
        if name == _HIDDEN:
            raise AttributeError(name)
        return _of(cls).ask("get", cls, name)


def _on_class(name: str) -> Callable:
    return lambda cls, *args: _of(cls).ask("special", cls, name, *args)


for _name in ("__iter__", "__len__", "__getitem__", "__contains__"):
    # Enumerations.
    setattr(StandInClass, _name, _on_class(_name))


class StandIn:
    """An object of the other side."""

    _is_made_here = False

    def __getattr__(self, name: str) -> Any:
        if name == _HIDDEN:
            raise AttributeError(name)
        return _of(self).ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            # Python sets the traceback of an exception.
            object.__setattr__(self, name, value)
        else:
            _of(self).ask("set", self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _of(self).ask("copy", self)

    def __delattr__(self, name: str) -> None:
        _of(self).ask("delete", self, name)


def _hidden(stand_in: Any) -> tuple["Peer", int]:
    """Return the connection and the number of a stand-in."""
    return (type if isinstance(stand_in, type) else object).__getattribute__(stand_in, _HIDDEN)


def _of(stand_in: Any) -> "Peer":
    return _hidden(stand_in)[0]


def _is_far(value: Any) -> bool:
    return isinstance(value, StandIn | StandInClass)


def _special(name: str) -> Callable:
    """Return the method `name` of stand-ins."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "__call__":
            return _of(self).call(self, args, kwargs)
        plain = any(not _is_far(one) for one in args)
        if plain and name in _COMPARE:
            # A container of a class of the program compares by its content.
            content = _of(self).ask("content", self)
            return NotImplemented if content is None else getattr(content, name)(*args)
        if plain and name in _ARITHMETIC and not self._is_made_here:
            return NotImplemented
        if plain and name == "__contains__" and not self._is_made_here:
            return any(one is args[0] or one == args[0] for one in self)
        value = _of(self).ask("special", self, name, *args)
        if name in _ARITHMETIC and isinstance(value, StandIn) and self._is_made_here:
            object.__setattr__(value, "_is_made_here", True)
        return value

    return method


class Peer:
    """One end of the connection. `is_open`: the other side has full access to the objects of this one. Otherwise it may
    call, iterate and compute, and use public attributes of objects whose classes the tests define."""

    def __init__(self, ends: socket.socket, is_open: bool):
        self._socket, self._is_open = ends, is_open
        self._own: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._far: dict[int, Any] = {}
        # Long numbers are sent as text.
        sys.set_int_max_str_digits(0)

    def call(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an object of the other side. Its changes to containers among the arguments are applied here."""
        value, after = self._asked("call", target, list(args), kwargs)
        if after is not None:
            _update([*args, *kwargs.values()], after)
        return value

    def ask(self, kind: str, *content: Any) -> Any:
        """Request an operation from the other side, and return the result."""
        return self._asked(kind, *content)[0]

    def say(self) -> None:
        """Signal that this side is ready."""
        self._send(["ready"])

    def wait(self) -> None:
        """Wait until the other side is ready. Raises EOFError if it has ended."""
        while self._receive() != ["ready"]:
            pass

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        with suppress(EOFError, OSError):
            while True:
                self._answer(self._receive())

    def _asked(self, kind: str, *content: Any) -> tuple[Any, Any]:
        self._send(["ask", kind, [self._encode(one) for one in content]])
        while True:
            message = self._receive()
            if message[0] != "ask":
                break
            self._answer(message)
        outcome, value, after, printed = message
        if printed:
            sys.stdout.write(str(printed))
        value = self._decode(value)
        if outcome == "raised":
            raise value if isinstance(value, BaseException) else TypeError("the program raised no exception")
        return value, None if after is None else self._decode(after)

    def _answer(self, message: list) -> None:
        outcome, after, stdout = "done", None, sys.stdout
        printed = sys.stdout = io.StringIO()
        try:
            content = [self._decode(one) for one in message[2]]
            value = self._encode(self._do(message[1], *content))
            if message[1] == "call":
                after = self._encode([*content[1], *content[2].values()])
        except BaseException as error:  # sent to the other side
            outcome, value = "raised", self._encode(error)
        finally:
            sys.stdout = stdout
        self._send([outcome, value, after, printed.getvalue()])

    def _do(self, kind: str, target: Any, *content: Any) -> Any:
        if not self._is_open and kind not in ("call", "special") and not _is_public(target, content):
            raise AttributeError(*content[:1])
        match kind, content:
            case "global", ():
                return sys.modules["__main__"].__dict__[target]
            case "call", (args, kwargs):
                return target(*args, **kwargs)
            case "special", (str() as name, *args) if name in _COMPARE | _ARITHMETIC | _OTHERS:
                return getattr(type(target), name)(target, *args)
            case "content", ():
                if isinstance(target, collections.abc.Set):
                    return set(target)
                return next((_plain(one, target) for one in _MUTABLE if isinstance(target, one)), None)
            case "copy", ():
                return copy.deepcopy(target)
            case "get", (str() as name,):
                return getattr(target, name)
            case "set", (str() as name, value):
                return setattr(target, name, value)
            case "delete", (str() as name,):
                return delattr(target, name)
        raise TypeError(kind)

    def _send(self, message: list) -> None:
        text = json.dumps(message).encode()
        self._socket.sendall(_LENGTH.pack(len(text)) + text)

    def _receive(self) -> list:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _LONGEST:
            raise EOFError
        return json.loads(self._read(length))

    def _read(self, length: int) -> bytes:
        text = bytearray()
        while len(text) < length:
            if not (read := self._socket.recv(min(length - len(text), 2**20))):
                raise EOFError
            text += read
        return bytes(text)

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind in _ITEMS.values():
            is_flat = _ATOMS.issuperset(map(type, value))
            return [kind.__name__, list(value) if is_flat else [self._encode(one) for one in value]]
        if kind in _VALUES:
            return ["value", kind.__qualname__, [self._encode(one) for one in _VALUES[kind][0](value)]]
        if kind.__module__ == "numpy" and kind.__name__ != "ufunc" and hasattr(value, "dtype"):
            return self._encode_array(value)
        if isinstance(value, types.ModuleType) and value.__name__ in sys.stdlib_module_names | {"numpy"}:
            return ["module", value.__name__]
        if _is_far(value):
            return ["yours", _hidden(value)[1]]
        if isinstance(value, type):
            return self._encode_class(value)
        if _CLASSES.get(kind.__name__) is kind and isinstance(value, BaseException):
            return ["error", kind.__name__, self._encode(list(value.args))]
        base = next((one for one in _FIXED if isinstance(value, one)), None)
        content = list(value.args) if isinstance(value, BaseException) else base and _plain(base, value)
        return ["object", self._number(value), self._encode_class(kind), self._encode(content)]

    def _encode_class(self, kind: type) -> Any:
        if _CLASSES.get(kind.__qualname__) is kind:
            return ["class", kind.__qualname__]
        own = [one for one in kind.__mro__ if one in _MUTABLE or one not in _CLASSES.values()]
        names = {name for one in own for name in vars(one)} & (_COMPARE | _ARITHMETIC | _OTHERS)
        bases = [self._encode_class(one) for one in kind.__bases__]
        return ["stand-in class", self._number(kind), kind.__name__, bases, sorted(names)]

    def _encode_array(self, value: Any) -> Any:
        if value.dtype.hasobject:
            return ["array", "O", list(value.shape), self._encode(value.ravel().tolist())]
        shape = list(value.shape) if type(value).__name__ == "ndarray" else None
        return ["array", value.dtype.str, shape, value.tobytes().hex()]

    def _number(self, value: Any) -> int:
        """Return the number of an object of this side, which lives as long as the connection."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._own)
            self._own.append(value)
        return self._numbers[id(value)]

    def _decode(self, given: Any) -> Any:
        if type(given) in _ATOMS:
            return given
        kind, *content = given
        if kind in _ITEMS:
            return _ITEMS[kind](self._decode(one) for one in content[0])
        match kind:
            case "value":
                return _VALUES[_BY_NAME[content[0]]][1](*(self._decode(one) for one in content[1]))
            case "array":
                return self._decode_array(*content)
            case "module" if content[0] in sys.stdlib_module_names | {"numpy"}:
                return __import__(content[0])
            case "yours":
                return self._own[content[0]]
            case "class":
                return _CLASSES[content[0]]
            case "error" if issubclass(_CLASSES[content[0]], BaseException):
                return _CLASSES[content[0]](*self._decode(content[1]))
            case "stand-in class":
                return self._stand_in_class(*content)
            case "object":
                return self._stand_in(*content)
        raise ValueError(kind)

    def _decode_array(self, kind: str, shape: list[int] | None, content: Any) -> Any:
        import numpy

        if kind == "O":
            items = self._decode(content)
            found = numpy.empty(len(items), dtype=object)
            for index, one in enumerate(items):
                found[index] = one
            return found.reshape(shape)
        found = numpy.frombuffer(bytes.fromhex(content), dtype=numpy.dtype(kind)).copy()
        return found[0] if shape is None else found.reshape(shape)

    def _stand_in_class(self, number: int, name: str, bases: list, names: list[str]) -> type:
        if number not in self._far:
            found = [self._decode(one) for one in bases]
            made = [one for one in found if one is not object and not issubclass(one, (*_MUTABLE, *_VALUES))]
            made = made if any(issubclass(one, StandIn) for one in made) else [StandIn, *made]
            native = {one for base in made for one in _FIXED if issubclass(base, one)}
            kept = [one for one in names if not (native and one in _COMPARE | {"__hash__", "__bool__"})]
            content = {one: _special(one) for one in kept if one in _COMPARE | _ARITHMETIC | _OTHERS}
            if native:
                # Numbers and texts of a program's own class compute as Python's, unless the tests made them.
                computing = _ARITHMETIC | {"__contains__"}
                content = {one: _or_native(one, *native) if one in computing else content[one] for one in content}
            content |= {_HIDDEN: (self, number), "__module__": "program"}
            self._far[number] = StandInClass(str(name), tuple(made), content)
        return self._far[number]

    def _stand_in(self, number: int, kind: Any, content: Any) -> Any:
        if number not in self._far:
            made, content = self._decode(kind), self._decode(content)
            base = next((one for one in (*_FIXED, BaseException) if issubclass(made, one)), object)
            given = content if base is BaseException else [content] if base is not object else []
            found = base.__new__(made, *given)
            object.__setattr__(found, _HIDDEN, (self, number))
            self._far[number] = found
        return self._far[number]


def _or_native(name: str, base: type) -> Callable:
    far, near = _special(name), getattr(base, name, None)

    def method(self: Any, *args: Any) -> Any:
        return near(self, *args) if near is not None and not self._is_made_here else far(self, *args)

    return method


def _is_public(target: Any, content: Sequence[Any]) -> bool:
    """Return whether the program may use an attribute of a test object."""
    kind = target if isinstance(target, type) else type(target)
    return kind.__module__ == "__main__" and bool(content) and not str(content[0]).startswith("_")


def _plain(base: type, value: Any) -> Any:
    """Return the plain value of an instance of a subclass of a built-in type."""
    match base:
        case builtins.int:
            return int.__index__(value) if not isinstance(value, bool) else value
        case builtins.float:
            return float.__add__(value, 0.0)
        case builtins.str:
            return str.__str__(value)
        case builtins.dict:
            return dict(dict.items(value))
        case builtins.complex:
            return complex.__add__(value, 0j)
        case builtins.bytes:
            return bytes.__getitem__(value, slice(None))
    return base(base.__iter__(value))


def _update(old: Any, new: Any) -> None:
    """Update containers in place to their content on the other side."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        merged = [_merged(*pair) for pair in zip(old, new, strict=False)]
        old[:] = merged + new[len(old) :]
    elif isinstance(old, tuple):
        for pair in zip(old, new, strict=False):
            _update(*pair)
    elif isinstance(old, dict):
        merged = {key: _merged(old.get(key), one) for key, one in new.items()}
        old.clear()
        old.update(merged)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, collections.deque | bytearray):
        old.clear()
        old.extend(new)
    elif type(old).__name__ == "ndarray" and old.shape == new.shape and old.flags.writeable:
        old[...] = new


def _merged(old: Any, new: Any) -> Any:
    if type(old) is not type(new) or not (isinstance(old, _MUTABLE) or type(old).__name__ == "ndarray"):
        return new
    _update(old, new)
    return old


class Names(dict):
    """The global names of tests: their own, and those of the program as they are now.

    A built-in name is Python's, unless the tests use no other name of the program: then it is what they test.
    """

    def __init__(self, peer: Peer, tests: str):
        import ast  # takes milliseconds, in which the program runs

        super().__init__(__name__="__main__")
        nodes = [*ast.walk(ast.parse(tests))]
        used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        made = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        made |= {(one.asname or one.name).split(".")[0] for one in nodes if isinstance(one, ast.alias)}
        self._hidden = frozenset(vars(builtins)) if used - made - vars(builtins).keys() else frozenset()
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        if name in self._hidden or name.startswith("__"):
            raise KeyError(name)
        if name in _COMPARING:
            # Tests compare with these modules, so the program must not replace them.
            return __import__(_COMPARING[name])
        return self._peer.ask("global", name)
