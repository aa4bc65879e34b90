"""The training job as data: every option with its default, read from TOML and the command line.

Everything is checked here: an unknown key or a bad value is an error that names its place, and no
other module sees an unchecked value. Imports no torch, so that a mistake is reported before
anything slow begins.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.core.errors import ShardwiseError

COMMAND_LINE = "command line"


class ConfigError(ShardwiseError, ValueError):
    """A job cannot run as it is written; the message names the file and the key."""


class _Section(BaseModel):
    """Base of every table: unknown keys are errors, values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(_Section):
    """What to train."""

    name: str = "gpt-mini"
    """A built-in size, `transformers:<type>`, or the path of a config.json or its directory."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """The dtype of the parameters when the model is built."""
    num_layers: int | None = Field(default=None, gt=0)
    """For built-in sizes only, like the four below: replaces the value of the named size."""
    width: int | None = Field(default=None, gt=0)
    num_heads: int | None = Field(default=None, gt=0)
    vocab: int | None = Field(default=None, gt=0)
    context: int | None = Field(default=None, gt=0)

    def shape(self) -> dict[str, int | None]:
        """The fields that reshape a built-in size."""
        return self.model_dump(exclude={"name", "dtype"})


class DataConfig(_Section):
    """What to train on."""

    source: str = "stdlib"
    """`stdlib` (the standard library's sources), a text file, or a .bin or .npy token file."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """The element type of a .bin file."""
    validation: float = Field(default=0.05, gt=0, lt=1)
    """The share of the tokens that is used for validation; taken from the end."""


class OptimConfig(_Section):
    """AdamW and its schedule: linear warm-up, then a cosine down to `min_lr_ratio * lr`."""

    lr: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    """Applied to matrices; biases and norms are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)


class StepsConfig(_Section):
    """How long to train, and with which batches."""

    steps: int = Field(default=60, gt=0)
    global_batch: int = Field(default=8, gt=0)
    """Sequences per step over all ranks and micro-batches; it alone decides what is learned."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Sequences that a rank computes at once; by default it follows from `accumulation`."""
    accumulation: int | None = Field(default=None, gt=0)
    """Micro-batches per step; by default it follows from `micro_batch`, else 1."""
    seq: int = Field(default=256, gt=1)
    """Tokens per sequence."""
    clip: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 does not clip."""
    on_nonfinite: Literal["stop", "skip", "go on"] = "stop"
    """What a NaN or an Inf in the loss or the gradients does; `skip` leaves out that update."""
    seed: int = Field(default=0, ge=0)
    eval_every: int = Field(default=0, ge=0)
    """Steps between validations; 0 validates once, at the end."""
    eval_batches: int = Field(default=4, gt=0)
    """Global batches per validation."""
    save_every: int = Field(default=0, ge=0)
    """Steps between two checkpoints; the last step is saved as well. 0 saves none."""
    keep: int = Field(default=3, gt=0)
    """How many checkpoints of the run are kept, the newest ones."""


class Batching(NamedTuple):
    """How the global batch of a step is divided."""

    micro_batch: int
    accumulation: int


class TrainConfig(_Section):
    """A whole training job."""

    plan: str = "auto"
    """``auto`` (probe this machine and plan for it), a preset's name, or a plan's TOML file."""
    lossless: bool = False
    """With ``auto``: no hop carries fewer bits than the model's dtype has."""
    nvme: str | None = None
    """A folder on a disk, for plans with states on tier nvme; replaces the plan's tiers.path."""
    levels: str | None = None
    """The grid of ranks, innermost first, such as `node=2,world=2`; by default torchrun's."""
    workers: int = Field(default=2, gt=0)
    """Local processes to start; ignored under an outer torchrun."""
    output: str | None = None
    """Directory for metrics, checkpoints and report; by default `runs/<timestamp>`."""
    resume: str | None = None
    """A checkpoint to go on from, or `latest`: the last one in `output`, if there is one."""
    timeout_s: float = Field(default=60.0, gt=0)
    """All ranks end within so long, with a report, when one was killed, stopped or cut off."""
    patience_s: float = Field(default=600.0, gt=0)
    """A rank that waits so long for one that lives raises an error."""
    max_restarts: int = Field(default=0, ge=0)
    """How often local workers are started anew, from the last checkpoint, after one has failed."""
    preempted_code: int = Field(default=0, ge=0, le=255)
    """The exit code after a SIGTERM, which saves a checkpoint and ends the run."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: StepsConfig = StepsConfig()

    def batching(self, world: int) -> Batching:
        """Divide the global batch over `world` ranks, or raise if that is not possible."""
        job = self.train
        accumulation = job.accumulation
        if accumulation is None:
            accumulation = (
                max(1, job.global_batch // (world * job.micro_batch)) if job.micro_batch else 1
            )
        micro_batch = job.micro_batch or max(1, job.global_batch // (world * accumulation))
        if micro_batch * accumulation * world != job.global_batch:
            raise ConfigError(
                f"train.global_batch = {job.global_batch} cannot be divided: {world} ranks x "
                f"{accumulation} micro-batches of {micro_batch} make "
                f"{world * accumulation * micro_batch}; change one of them"
            )
        return Batching(micro_batch, accumulation)

    def to_toml(self) -> str:
        """The job as TOML that loads back to an equal job; unset options are omitted."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load_config(path: str | Path | None, changes: dict[str, Any] | None = None) -> TrainConfig:
    """Read a job from `path` (None: all defaults) and apply `changes` by dotted key."""
    table = _read_toml(Path(path)) if path is not None else {}
    for key, value in (changes or {}).items():
        _put(table, key, value)
    try:
        return TrainConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_sentences(error, str(path), set(changes or {}))) from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split `key=value` of the command line; the value is TOML, otherwise a plain string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise ConfigError(f"{COMMAND_LINE}: {text!r} is not of the form key=value")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{COMMAND_LINE}: {section!r} in {key!r} is not a table")
    table[last] = value


def _sentences(error: ValidationError, file: str, changed: set[str]) -> str:
    """One line per mistake: which file, which key, what is wrong."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        origin = COMMAND_LINE if any(f"{key}.".startswith(f"{c}.") for c in changed) else file
        if item["type"] == "extra_forbidden":
            lines.append(f"{origin}: unknown key {key!r}{_nearest(item['loc'])}")
        else:
            problem = item["msg"].replace("Input should", "should")
            lines.append(f"{origin}: {key} {problem}, not {item['input']!r}")
    return "\n".join(lines)


def _nearest(loc: tuple[int | str, ...]) -> str:
    """A hint for an unknown key: the most similar one, or the table that has this name."""
    model: type[BaseModel] = TrainConfig
    for part in loc[:-1]:
        model = model.model_fields[str(part)].annotation  # type: ignore[assignment]
    name = str(loc[-1])
    near = difflib.get_close_matches(name, model.model_fields, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    for section, field in TrainConfig.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and name in getattr(table, "model_fields", {}):
            return f"; did you mean '{section}.{name}'?"
    return f"; known keys are {', '.join(model.model_fields)}"
