"""Wire formats: how the elements of a hop travel, and how many bytes that takes.

A format is written as its kind, then options: ``int8``, ``int4/64``, ``int4/symmetric``,
``int4/64/delta``, ``int4/feedback``. A state's wire is a format for every level (``int8``), formats
by level (``node=int8,world=int4/64``), or both (``int4,node=int8``); without one elements travel
raw.

[Note: Rows]
Elements of int8 and int4 travel in blocks. A block is one row of bytes: its codes, then the scale
and zero point, so that any run of whole rows can be sent and decoded on its own. Row layout::

    int8           a byte per element      scale (bfloat16)   zero point (int16, min-max only)
    int4           two elements per byte   scale (bfloat16)   zero point (int16, min-max only)

A ragged end is one shorter row, so nothing is padded except the last half byte of an odd int4 row.
``wire/reference.py`` defines how the bytes are computed.

[Note: Min-max or symmetric]
Min-max is the default of both kinds. Relative RMS errors (``benchmarks/codecs.py``) of Gaussian
values, of heavy tails like those of gradients (Student's t, 3 degrees of freedom), and of Gaussian
values with deviation 0.02 around one, like weights of norms::

                          bits     Gaussian   heavy tails   around one
    int8                  8.125    0.0065     0.014         0.00013
    int8/symmetric        8.0625   0.0070     0.019         0.0024
    int4                  4.25     0.101      0.150         0.0020
    int4/symmetric        4.125    0.118      0.203         0.054
    int4/64/symmetric     4.25     0.108      0.163         0.051

So the two bytes of a zero point reduce errors more than smaller blocks of the same total size.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from shardwise.core.errors import PlanError

CODE_BITS = {"int8": 8, "int4": 4}
"""Bits per code, for the kinds that travel in blocks."""
CAST_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element, for the kinds that are casts."""
CAST_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The torch names of the casts' dtypes."""
KINDS = (*CAST_BYTES, *CODE_BITS)
DEFAULT_BLOCK = {"int8": 256, "int4": 128}
BLOCKS = tuple(1 << power for power in range(5, 13))
"""Legal numbers of elements of a block: powers of two from 32 to 4096."""
SCALE_BYTES = 2
ZERO_POINT_BYTES = 2
FLAGS = ("minmax", "symmetric", "feedback", "delta")

# The significant bits of float dtypes, to find out whether a cast is lossy.
_PRECISION = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_EXPONENT = {"float64": 11, "float32": 8, "float16": 5, "bfloat16": 8}


@dataclass(frozen=True, slots=True)
class Format:
    """How elements travel on one hop."""

    kind: str
    """``fp32``, ``bf16``, ``fp16`` (casts), ``int8`` or ``int4`` (blocks)."""
    block: int = 0
    """Elements per block; 0: the kind's default. Casts have no blocks."""
    minmax: bool = True
    """Codes range from a block's minimum to its maximum; False: they are symmetric about zero."""
    feedback: bool = False
    """The sender adds the error of the last encoding to the next gradient."""
    delta: bool = False
    """A refresh sends the difference from the old weights."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"'{self.kind}' is not a wire format; {_nearest(self.kind, KINDS)}.")
        if not self.is_blocked:
            if self.block or not self.minmax:
                raise PlanError(
                    f"Wire format {self.kind} is a cast and has no blocks, so neither a block size "
                    "nor symmetric applies to it; use int8 or int4 for those."
                )
            if self.kind == "fp32" and (self.feedback or self.delta):
                raise PlanError(
                    "Wire format fp32 loses nothing that feedback or delta could correct; "
                    "omit them, or use bf16, int8 or int4."
                )
            return
        if not self.block:
            object.__setattr__(self, "block", DEFAULT_BLOCK[self.kind])
        if self.block not in BLOCKS:
            near = min(BLOCKS, key=lambda block: abs(block - self.block))
            raise PlanError(
                f"A block of {self.block} elements in wire format {self.kind} is not a power of "
                f"two from {BLOCKS[0]} to {BLOCKS[-1]}; the nearest is {self.kind}/{near}."
            )

    @classmethod
    def parse(cls, text: str) -> "Format":
        """Parse a kind and its options.

        >>> Format.parse("int4/64/delta")
        Format(kind='int4', block=64, minmax=True, feedback=False, delta=True)
        """
        kind, *options = (item.strip() for item in text.split("/"))
        if kind not in KINDS:
            raise PlanError(f"'{kind}' in '{text}' is not a wire format; {_nearest(kind, KINDS)}.")
        names = ["block" if option.isdecimal() else option for option in options]
        for name in names:
            if name != "block" and name not in FLAGS:
                raise PlanError(
                    f"'{name}' in wire format '{text}' is neither a block size nor an option; "
                    f"{_nearest(name, FLAGS)}."
                )
        if len(set(names)) != len(names) or {"minmax", "symmetric"} <= set(names):
            raise PlanError(
                f"Wire format '{text}' sets an option twice; write for example int4/64/symmetric."
            )
        block = next((int(option) for option in options if option.isdecimal()), 0)
        if block == 0 and "block" in names:
            raise PlanError(
                f"Wire format '{text}' has blocks of no element; write for example {kind}/"
                f"{DEFAULT_BLOCK.get(kind, 256)}."
            )
        if kind not in CODE_BITS and "minmax" in names:
            raise PlanError(
                f"Wire format '{text}' is a cast, so minmax does not apply to it; write {kind}."
            )
        return cls(kind, block, "symmetric" not in names, "feedback" in names, "delta" in names)

    def __str__(self) -> str:
        options = [
            str(self.block) * (self.block != DEFAULT_BLOCK.get(self.kind, 0)),
            "symmetric" * (not self.minmax),
            "feedback" * self.feedback,
            "delta" * self.delta,
        ]
        return "/".join([self.kind, *filter(None, options)])

    @property
    def is_blocked(self) -> bool:
        """Whether elements travel as codes in blocks, not as casts."""
        return self.kind in CODE_BITS

    @property
    def bits(self) -> float:
        """Bits per element in a long buffer, including scales and zero points."""
        if self.is_blocked:
            return 8 * row_bytes(self, self.block) / self.block
        return 8 * CAST_BYTES[self.kind]

    def is_lossy(self, dtype: str = "float32") -> bool:
        """Whether values of a float dtype (by its torch name) may arrive changed.

        >>> Format("bf16").is_lossy("bfloat16"), Format("bf16").is_lossy("float16")
        (False, True)
        """
        if self.is_blocked:
            return True
        cast = CAST_DTYPES[self.kind]
        return _PRECISION[cast] < _PRECISION[dtype] or _EXPONENT[cast] < _EXPONENT[dtype]


@dataclass(frozen=True, slots=True)
class Wire:
    """The formats of a state's hops: one for all levels, and others for named levels."""

    everywhere: Format | None = None
    by_level: tuple[tuple[str, Format], ...] = ()

    def __post_init__(self) -> None:
        names = self.levels
        for name in names:
            if not name.isidentifier():
                raise PlanError(
                    f"'{name}' in wire '{self}' names no level; "
                    "write for example node=int8,world=int4."
                )
        if len(set(names)) != len(names):
            raise PlanError(f"Wire '{self}' names a level twice.")

    @classmethod
    @lru_cache(maxsize=256)  # thousands of plans are priced, with few different wires
    def parse(cls, text: str) -> "Wire":
        """Parse ``int8`` (all levels), ``node=int8,world=int4/64``, both, or nothing (raw).

        >>> str(Wire.parse("int8, world=int4/64").at("world"))
        'int4/64'
        """
        everywhere, by_level = None, []
        for item in text.split(",") if text.strip() else ():
            level, equals, spec = (part.strip() for part in item.rpartition("="))
            if equals:
                by_level.append((level, Format.parse(spec)))
            elif everywhere is None:
                everywhere = Format.parse(spec)
            else:
                raise PlanError(
                    f"Wire '{text}' has two formats for every level, {everywhere} and {spec}; "
                    "write for example node=int8,world=int4."
                )
        return cls(everywhere, tuple(by_level))

    def __str__(self) -> str:
        named = [f"{level}={spec}" for level, spec in self.by_level]
        return ",".join([str(self.everywhere), *named] if self.everywhere else named)

    def __bool__(self) -> bool:
        return bool(self.formats)

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that are named."""
        return tuple(level for level, _ in self.by_level)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Every format that occurs."""
        named = tuple(spec for _, spec in self.by_level)
        return (self.everywhere, *named) if self.everywhere else named

    def at(self, level: str, *, innermost: bool = False) -> Format | None:
        """The format on the hops of a level; None: raw, in the buffer's own dtype.

        As in a spread, ``node`` means the innermost level if no level has that name.

        >>> str(Wire.parse("int4,node=int8").at("island", innermost=True))
        'int8'
        """
        named = dict(self.by_level)
        alias = named.get("node") if innermost else None
        return named.get(level) or alias or self.everywhere

    def is_lossy(self, dtype: str = "float32") -> bool:
        """Whether values of a float dtype may change on some level."""
        return any(spec.is_lossy(dtype) for spec in self.formats)


def row_bytes(spec: Format, numel: int) -> int:
    """Bytes of a row with ``numel`` elements; see [Note: Rows].

    >>> row_bytes(Format("int8"), 256), row_bytes(Format("int4"), 128)
    (260, 68)
    """
    codes = -(-numel * CODE_BITS[spec.kind] // 8)
    return codes + SCALE_BYTES + ZERO_POINT_BYTES * spec.minmax


def wire_bytes(spec: Format, numel: int) -> int:
    """Bytes of the payload of ``numel`` elements: full rows, then a shorter one for a ragged end.

    >>> wire_bytes(Format("bf16"), 3), wire_bytes(Format("int8"), 257)
    (6, 265)
    """
    if not spec.is_blocked:
        return numel * CAST_BYTES[spec.kind]
    rows, tail = divmod(numel, spec.block)
    return rows * row_bytes(spec, spec.block) + (row_bytes(spec, tail) if tail else 0)


def _nearest(name: str, choices: tuple[str, ...]) -> str:
    """A hint with the right spelling of a wrong name."""
    near = get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"the nearest is {near[0]}" if near else f"use one of {', '.join(choices)}"
