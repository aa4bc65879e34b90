"""An unpickler that executes nothing: its opcodes build plain data, and only listed names exist.

Python's own unpickler calls whatever a file names; restricting ``find_class`` does not stop a file
from changing the attributes of what it admits, nor from asking for a memo of any size. So this one
is an interpreter of its own. It imports nothing and looks nothing up: a name of the list becomes a
maker (a function of this package that checks its arguments) or an inert ``Record``, and any other
name is refused. Every loop consumes bytes of the file, and its memo is a dict, so work and memory
are bounded by the file's size, which is limited too.
"""

import pickle
import struct
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.errors import UsageError

MAX_PICKLE_BYTES = 1 << 29
"""An empty list takes one byte of a pickle, and some seventy of memory."""
_DAMAGED = (
    AttributeError, IndexError, KeyError, ValueError, TypeError, OverflowError, RecursionError,
    struct.error,
)  # fmt: skip
_LONGEST_NUMBER = 1 << 10
_SMALL = 1 << 20
_FLAT_KEYS = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True)
class Named:
    """A type that a file names without making anything of it, such as the type of a storage."""

    name: str


@dataclass(frozen=True)
class Maker:
    """A function of ours that stands for a function or class that a file calls."""

    make: Callable[..., Any]


@dataclass(eq=False)
class Record:
    """An object of a listed class: its name, its arguments and its state, without behaviour."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the pickled object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class Mapping_(dict[Any, Any]):  # noqa: N801
    """Stands for OrderedDict and its like; attributes that a file gives it are dropped."""


Allowed = Mapping[str, object]
"""What a file may name: makers, named types, and constants such as dtypes."""


def loads(
    data: bytes,
    where: str,
    allowed: Allowed,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Plain data from a pickle; ``where`` begins the sentences of errors."""
    if len(data) > MAX_PICKLE_BYTES:
        raise UsageError(
            f"{where} is a pickle of {len(data)} bytes, more than the {MAX_PICKLE_BYTES} that are "
            "read; it is no checkpoint's."
        )
    machine = _Machine(data, where, allowed, persistent)
    try:
        return machine.run()
    except _DAMAGED as error:
        raise UsageError(
            f"{where} is damaged: its pickle cannot be read at byte {machine.at} "
            f"({type(error).__name__}); copy or save it again."
        ) from error


def shown(text: str) -> str:
    """A text from a file, in a message: short, and without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])


def is_key(value: object) -> bool:
    """Whether a value may be a key: hashing deeply nested tuples could overflow the C stack."""
    if isinstance(value, tuple):
        return all(isinstance(item, _FLAT_KEYS) for item in value)
    return isinstance(value, (*_FLAT_KEYS, Record)) or (
        isinstance(value, Hashable) and type(value).__hash__ is object.__hash__
    )


class _Machine:
    """The state of one run."""

    def __init__(
        self,
        data: bytes,
        where: str,
        allowed: Allowed,
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data = data
        self.at = 0
        self.where = where
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._allowed = allowed
        self._left = _SMALL + 4 * len(data)

    def run(self) -> Any:
        data, size = self.data, len(self.data)
        while self.at < size:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                (value,) = self.stack
                return value
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise UsageError(
                    f"{self.where} uses opcode 0x{code:02x} of pickles, which no torch.save "
                    "writes; it was not read."
                )
            operation(self)
        raise IndexError("a pickle without an end")

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise IndexError("a pickle without an end")
        found = self.data[self.at : end]
        self.at = end
        return found

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def long(self, count: int) -> int:
        """A number; the time to compute with it grows with the square of its length."""
        if count > _LONGEST_NUMBER:
            raise ValueError("a number too long")
        return int.from_bytes(self.take(count), "little", signed=True)

    def spend(self, values: tuple[Any, ...]) -> None:
        """Makers copy what they get; a text in the memo could be copied without end."""
        self._left -= sum(
            len(v) for v in values if isinstance(v, str | bytes | list | tuple | dict)
        )
        if self._left < 0:
            raise ValueError("copies of more than the file has")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def name(self, module: str, name: str) -> object:
        """What stands for a global: never the thing itself."""
        full = f"{module}.{name}"
        if full not in self._allowed:
            raise UsageError(
                f"{self.where} asks for '{shown(full)}', which is not among the names that a "
                "checkpoint may use; nothing was executed. Read this file only with the program "
                "that wrote it, if you trust it."
            )
        return self._allowed[full]

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise TypeError("items for what is not a dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not is_key(key):
                raise TypeError("a key that is not plain")
            target[key] = value


_Operation = Callable[[_Machine], None]
_OPERATIONS: dict[int, _Operation] = {}
_STOP = pickle.STOP[0]


def _on(*codes: bytes) -> Callable[[_Operation], _Operation]:
    def register(operation: _Operation) -> _Operation:
        _OPERATIONS.update({code[0]: operation for code in codes})
        return operation

    return register


def _push(code: bytes, value: Callable[[_Machine], Any]) -> None:
    _OPERATIONS[code[0]] = lambda m: m.stack.append(value(m))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_push(pickle.NONE, lambda m: None)
_push(pickle.NEWTRUE, lambda m: True)
_push(pickle.NEWFALSE, lambda m: False)
_push(pickle.BININT, lambda m: int.from_bytes(m.take(4), "little", signed=True))
_push(pickle.BININT1, lambda m: m.number(1))
_push(pickle.BININT2, lambda m: m.number(2))
_push(pickle.LONG1, lambda m: m.long(m.number(1)))
_push(pickle.LONG4, lambda m: m.long(m.number(4)))
_push(pickle.BINFLOAT, lambda m: struct.unpack(">d", m.take(8))[0])
_push(pickle.SHORT_BINUNICODE, lambda m: _text(m.take(m.number(1))))
_push(pickle.BINUNICODE, lambda m: _text(m.take(m.number(4))))
_push(pickle.BINUNICODE8, lambda m: _text(m.take(m.number(8))))
_push(pickle.SHORT_BINBYTES, lambda m: m.take(m.number(1)))
_push(pickle.BINBYTES, lambda m: m.take(m.number(4)))
_push(pickle.BINBYTES8, lambda m: m.take(m.number(8)))
_push(pickle.BYTEARRAY8, lambda m: m.take(m.number(8)))
_push(pickle.EMPTY_TUPLE, lambda m: ())
_push(pickle.EMPTY_LIST, lambda m: [])
_push(pickle.EMPTY_DICT, lambda m: {})
_push(pickle.EMPTY_SET, lambda m: set())
_push(pickle.TUPLE, lambda m: tuple(m.since_mark()))
_push(pickle.BINGET, lambda m: m.memo[m.number(1)])
_push(pickle.LONG_BINGET, lambda m: m.memo[m.number(4)])
_push(pickle.GLOBAL, lambda m: m.name(m.line(), m.line()))


@_on(pickle.PROTO)
def _proto(m: _Machine) -> None:
    m.take(1)


@_on(pickle.FRAME)
def _frame(m: _Machine) -> None:
    m.take(8)  # frames only tell how much to read ahead


@_on(pickle.MARK)
def _mark(m: _Machine) -> None:
    m.marks.append(len(m.stack))


@_on(pickle.POP)
def _pop(m: _Machine) -> None:
    m.stack.pop()


@_on(pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
def _short_tuple(m: _Machine) -> None:
    count = 1 + m.data[m.at - 1] - pickle.TUPLE1[0]
    if len(m.stack) < count:
        raise IndexError("a tuple of what is not there")
    m.stack[-count:] = [tuple(m.stack[-count:])]


@_on(pickle.APPEND)
def _append(m: _Machine) -> None:
    value = m.stack.pop()
    _list_of(m).append(value)


@_on(pickle.APPENDS)
def _appends(m: _Machine) -> None:
    values = m.since_mark()
    _list_of(m).extend(values)


def _list_of(m: _Machine) -> list[Any]:
    target = m.stack[-1]
    if isinstance(target, Record):
        return target.items
    if not isinstance(target, list):
        raise TypeError("items for what is not a list")
    return target


@_on(pickle.SETITEM)
def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items([key, value])


@_on(pickle.SETITEMS)
def _set_items(m: _Machine) -> None:
    m.set_items(m.since_mark())


@_on(pickle.ADDITEMS)
def _add_items(m: _Machine) -> None:
    values, target = m.since_mark(), m.stack[-1]
    if not isinstance(target, set) or not all(map(is_key, values)):
        raise TypeError("items for what is not a set")
    target.update(values)


@_on(pickle.FROZENSET)
def _frozen_set(m: _Machine) -> None:
    values = m.since_mark()
    if not all(map(is_key, values)):
        raise TypeError("a set of what is not plain")
    m.stack.append(frozenset(values))


@_on(pickle.BINPUT)
def _put(m: _Machine) -> None:
    m.memo[m.number(1)] = m.stack[-1]


@_on(pickle.LONG_BINPUT)
def _put_far(m: _Machine) -> None:
    m.memo[m.number(4)] = m.stack[-1]


@_on(pickle.MEMOIZE)
def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


@_on(pickle.STACK_GLOBAL)
def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError("a name that is not a string")
    m.stack.append(m.name(module, name))


@_on(pickle.REDUCE, pickle.NEWOBJ)
def _call(m: _Machine) -> None:
    args, maker = m.stack.pop(), m.stack.pop()
    if not isinstance(maker, Maker) or not isinstance(args, tuple):
        raise TypeError("a call of what cannot be called")
    m.spend(args)
    m.stack.append(maker.make(*args))


@_on(pickle.BUILD)
def _build(m: _Machine) -> None:
    state, target = m.stack.pop(), m.stack[-1]
    if isinstance(target, Record):
        target.state = state
    elif not isinstance(target, Mapping_):
        raise TypeError("a state for what has none")


@_on(pickle.BINPERSID)
def _persistent(m: _Machine) -> None:
    if m.persistent is None:
        raise TypeError("a reference to data outside the pickle")
    m.stack.append(m.persistent(m.stack.pop()))
