"""Plans as TOML files. Every key is checked, and every mistake is a sentence with a remedy.

A file has the fields of a Plan; ``preset = "zero3"`` starts from a preset instead of the defaults.
Values that are illegal on every topology are refused here, so that the sentence can name the file;
``validate.check`` checks the rest.
"""

import os
import tomllib
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from shardwise.core.errors import PlanError
from shardwise.core.sizes import parse_bytes
from shardwise.plans.plan import Override, Plan, StatePlan
from shardwise.plans.presets import PRESETS
from shardwise.plans.validate import value_violations

STATES = ("params", "grads", "optim")


class _Table(BaseModel):
    """Base of every table: no conversions, no unknown keys; None: the key is absent."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StateTable(_Table):
    """``[params]``, ``[grads]`` or ``[optim]``; absent keys are those of the preset."""

    spread: str | None = None
    wire: str | None = None
    tier: str | None = None


class PrecisionTable(_Table):
    """``[precision]``."""

    compute: str | None = None
    reduce: str | None = None
    master: str | None = None


class TiersTable(_Table):
    """``[tiers]``."""

    path: str | None = None
    device_bytes: int | str | None = None
    cpu_bytes: int | str | None = None
    nvme_bytes: int | str | None = None
    window_numel: int | None = None
    update: str | None = None
    checksum: bool | None = None


class TilingTable(_Table):
    """``[tiling]``."""

    numel: int | None = None
    loss: bool | None = None


class OverrideTable(_Table):
    """``[[overrides]]``."""

    unit: str
    params: StateTable | None = None
    grads: StateTable | None = None
    optim: StateTable | None = None
    keep: str | None = None


class PlanTable(_Table):
    """The whole file."""

    preset: str | None = None
    name: str | None = None
    params: StateTable | None = None
    grads: StateTable | None = None
    optim: StateTable | None = None
    keep: str | None = None
    keep_until: str | None = None
    activations: str | None = None
    precision: PrecisionTable | None = None
    prefetch: int | None = None
    tiers: TiersTable | None = None
    tiling: TilingTable | None = None
    units: list[str] | None = None
    min_unit_numel: int | None = None
    overrides: list[OverrideTable] | None = None


TABLES: dict[str, type[_Table]] = {
    "": PlanTable,
    **dict.fromkeys(STATES, StateTable),
    "precision": PrecisionTable,
    "tiers": TiersTable,
    "tiling": TilingTable,
    "overrides": OverrideTable,
}
"""The tables by their keys."""


def load_plan(source: Plan | str | os.PathLike[str]) -> Plan:
    """A plan by a preset's name or the path of a .toml file; a Plan as it is.

    >>> load_plan("zero1").optim.spread
    'world'
    """
    if isinstance(source, Plan):
        return source
    if not isinstance(source, str | os.PathLike):
        raise PlanError(
            f"plan must be a Plan, a preset's name or the path of a .toml file, not {source!r}; "
            "presets are called, as in presets.zero3()."
        )
    if isinstance(source, str):
        if source in PRESETS:
            return PRESETS[source]()
        if not source.endswith(".toml"):
            raise PlanError(
                f"Plan '{source}' is neither a preset nor the path of a .toml file; "
                f"{_nearest_preset(source)}"
            )
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        presets = ", ".join(PRESETS)
        raise PlanError(
            f"Plan file {path} does not exist; check the path, or use a preset: {presets}."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"Plan file {path} cannot be read ({reason}); correct it.") from None
    return parse_plan(text, origin=str(path))


def parse_plan(text: str, *, origin: str = "plan.toml") -> Plan:
    """A plan from the text of a plan file; ``origin`` is the file's name in errors.

    >>> parse_plan('preset = "zero3"\\nkeep = "node"').keep
    'node'
    """
    try:
        table = PlanTable.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"Plan file {origin} is not TOML: {error}; correct it there.") from None
    except ValidationError as error:
        raise PlanError("\n".join(_sentences(error, origin))) from None
    if table.preset is not None and table.preset not in PRESETS:
        raise PlanError(
            f"In plan file {origin}, preset '{table.preset}' is unknown; "
            f"{_nearest_preset(table.preset)}"
        )
    try:
        plan = _apply(table, PRESETS[table.preset]() if table.preset is not None else Plan())
    except PlanError as error:
        raise PlanError(f"In plan file {origin}: {error}") from None
    if found := value_violations(plan):
        raise PlanError("\n".join(f"In plan file {origin}: {sentence}" for sentence in found))
    return plan


def dump_plan(plan: Plan) -> str:
    """A plan as TOML: its three spreads, and everything that differs from the defaults.

    >>> print(dump_plan(Plan(name="mine", optim=StatePlan(spread="world"), prefetch=2)))
    name = "mine"
    prefetch = 2
    <BLANKLINE>
    [params]
    spread = "none"
    <BLANKLINE>
    [grads]
    spread = "none"
    <BLANKLINE>
    [optim]
    spread = "world"
    <BLANKLINE>
    """
    default = Plan()
    table: dict[str, Any] = {}
    for field in fields(Plan):
        if field.name == "separate_memory":
            continue  # of the device that it was placed on, not of the plan
        value = getattr(plan, field.name)
        if field.name in STATES or value != getattr(default, field.name):
            table[field.name] = _plain(value)
    return tomli_w.dumps(table)


def _plain(value: Any, *, inherits: bool = False) -> Any:
    """A field's value in TOML's types; values that make no difference are omitted.

    So is a raw wire, except in an override, where an absent one ``inherits`` the plan's.
    """
    if isinstance(value, tuple):
        return [_plain(item, inherits=isinstance(item, Override)) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    nothing = (None,) if inherits else (None, "")
    items = ((field, getattr(value, field.name)) for field in fields(value))
    return {
        field.name: _plain(item, inherits=inherits)
        for field, item in items
        if item not in nothing and (inherits or field.name == "spread" or item != field.default)
    }


def _apply(table: PlanTable, base: Plan) -> Plan:
    """``base`` with the changes of the file."""
    changes: dict[str, Any] = {
        name: value
        for name in ("name", "keep", "keep_until", "activations", "prefetch", "min_unit_numel")
        if (value := getattr(table, name)) is not None
    }
    changes |= _states(table, base)
    if table.precision is not None:
        chosen = table.precision.model_dump(exclude_none=True)
        changes["precision"] = replace(base.precision, **chosen)
    if table.tiers is not None:
        changes["tiers"] = replace(base.tiers, **_tiers(table.tiers))
    if table.tiling is not None:
        changes["tiling"] = replace(base.tiling, **table.tiling.model_dump(exclude_none=True))
    if table.units is not None:
        changes["units"] = tuple(table.units)
    plan = replace(base, **changes)
    if table.overrides is None:
        return plan
    overrides = (
        Override(unit=item.unit, keep=item.keep, **_states(item, plan)) for item in table.overrides
    )
    return replace(plan, overrides=tuple(overrides))


def _tiers(table: TiersTable) -> dict[str, Any]:
    """Budgets may be written as ``"2 GiB"``."""
    chosen = table.model_dump(exclude_none=True)
    return {
        key: parse_bytes(value, f"tiers.{key}") if key.endswith("_bytes") else value
        for key, value in chosen.items()
    }


def _states(table: PlanTable | OverrideTable, base: Plan) -> dict[str, StatePlan]:
    """The states that a table changes; keys that it omits stay as in ``base``."""
    return {
        name: replace(getattr(base, name), **state.model_dump(exclude_none=True))
        for name in STATES
        if (state := getattr(table, name)) is not None
    }


_WANTED = {
    "string_type": "a string",
    "int_type": "a whole number",
    "list_type": "an array",
    "model_type": "a table",
}
"""What the key must be, by pydantic's name of the error."""


def _sentences(error: ValidationError, origin: str) -> list[str]:
    """One sentence per mistake: the file, the key, and what to do."""
    found = []
    for item in error.errors(include_url=False):
        key = _key(item["loc"])
        if item["type"] == "extra_forbidden":
            hint = _nearest_key(item["loc"])
            found.append(f"Plan file {origin} has an unknown key '{key}'; {hint}")
        elif item["type"] == "missing":
            found.append(f"Plan file {origin} lacks the key '{key}'; add it or remove its table.")
        else:
            wanted = _WANTED.get(item["type"], item["msg"])
            given = item["input"]
            if wanted == "a table" and item["loc"][-1] in STATES:
                wanted += f" such as {{ spread = {given!r} }}"
            found.append(f"In plan file {origin}, '{key}' must be {wanted}, not {given!r}.")
    return found


def _key(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _nearest_key(loc: tuple[int | str, ...]) -> str:
    """A hint for an unknown key: a similar one of its table, or the table that has this name."""
    name = str(loc[-1])
    opened = [part for part in loc[:-1] if isinstance(part, str)]
    known = list(TABLES[opened[-1] if opened else ""].model_fields)
    if near := get_close_matches(name, known, n=1):
        return f"did you mean '{near[0]}'?"
    for opener, table in TABLES.items():
        if opener and name in table.model_fields:
            return f"did you mean '{opener}.{name}'?"
    return f"use {', '.join(known)}."


def _nearest_preset(name: str) -> str:
    near = get_close_matches(name, PRESETS, n=1)
    return f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(PRESETS)}."
