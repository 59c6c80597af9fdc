"""The one typed configuration tree of a run (`run.toml`). Imports no torch.

Unknown keys are refused with the nearest valid name; every value is checked when the tree is
built; the resolved tree is written beside each run.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lamella.errors import UserError
from lamella.units import parse_bytes


def _check_size(text: str) -> str:
    try:
        parse_bytes(text)
    except UserError as error:
        raise ValueError(error.what) from error
    return text


Decay = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[str, AfterValidator(_check_size)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataConfig(Section):
    train: tuple[Path, ...] = ()
    """JSONL files (or folders of them) to train on; relative to the file that names them."""
    format: Literal["auto", "messages", "prompt_completion", "sharegpt", "alpaca"] = "auto"
    """Row format; `auto` detects and states it per file."""
    train_on: Literal["all", "last"] = "all"
    """Which assistant turns carry labels."""
    max_tokens: int = Field(2048, ge=2)
    """Longest sequence in tokens, prompt and answer together."""
    too_long: Literal["refuse", "drop", "cut_prompt"] = "refuse"
    """Rows over `max_tokens`: stop before training, drop and count, or cut the prompt from its left."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """Rows that cannot be used (broken JSON, no answer, ...): stop, or drop and count."""
    max_drop_share: float = Field(0.1, ge=0, le=1)
    """Stop when a larger share of all rows than this is dropped."""
    system: str | None = None
    """System text for rows without one. None adds none."""
    chat_template: Path | None = None
    """Jinja chat template to use in place of the tokenizer's own; it travels with the adapter."""


class LoraConfig(Section):
    rank: int = Field(16, ge=1)
    """Rank r of each adapter pair (A [r, in], B [out, r])."""
    alpha: float = Field(32.0, gt=0)
    """Scale is alpha / r, or alpha / sqrt(r) with rslora."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input, seeded by (step, row, layer, site)."""
    rslora: bool = False
    """Rank-stabilised scale alpha / sqrt(r)."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """`all-linear` (every linear layer and the experts, not routers), or names: a module's last name
    (`q_proj`), a dotted suffix (`self_attn.q_proj`), an expert parameter (`experts.gate_up_proj`)."""
    expert_rank: int | Literal["auto"] = "auto"
    """Rank on experts; `auto` is max(1, rank / active experts)."""

    @model_validator(mode="after")
    def _check(self) -> LoraConfig:
        if isinstance(self.expert_rank, int) and self.expert_rank < 1:
            raise ValueError(f"expert_rank must be 1 or more, got {self.expert_rank}")
        if isinstance(self.targets, tuple) and not self.targets:
            raise ValueError("targets is empty: nothing would be trained")
        return self


class TrainConfig(Section):
    steps: int | None = Field(None, ge=1)
    """Optimizer steps; None: as many as `epochs` gives."""
    epochs: float = Field(1.0, gt=0)
    """Passes over the data when `steps` is not given."""
    rows_per_step: int | None = Field(None, ge=1)
    """Rows per optimizer step; None: as many as fill `tokens_per_step`."""
    tokens_per_step: int = Field(8192, ge=1)
    """Token budget of an optimizer step when `rows_per_step` is not given."""
    micro_batch_tokens: int = Field(2048, ge=1)
    """Token budget of a micro-batch; changes memory and speed, never the result beyond rounding."""
    learning_rate: float = Field(2e-4, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up; cosine and linear end at zero."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW moment decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    clip_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0 does not clip."""
    router_aux_coef: float | None = Field(None, ge=0)
    """Weight of the router balancing loss; None takes the model config's `router_aux_loss_coef` when its
    `output_router_logits` asks for it, else 0."""
    max_bad_steps: int = Field(3, ge=0)
    """Steps with a non-finite loss or gradient are skipped; stop after this many in a row."""
    seed: int = 0
    """Seeds adapter init, row order and dropout."""


class MemoryConfig(Section):
    budget: Size | None = None
    """Memory for all that training holds beyond the program itself, such as "2GiB"; None: no limit of ours. Layers that
    do not fit are streamed from the store; a run that cannot fit is refused before its first step."""
    recompute: Literal["auto", "always", "never"] = "auto"
    """Recompute each layer in the backward walk, keep its activations, or choose by budget."""
    state: Literal["auto", "ram", "disk"] = "auto"
    """Where the adapter's fp32 values, gradients and moments are (16 bytes per trained parameter): in RAM, or in a
    memory-mapped file in the run's folder, of which one layer is in RAM at a time. Equal bits, slower by its disk.
    `auto`: on disk when they would take more than half of `budget`, else in RAM."""


class ComputeConfig(Section):
    device: str = "cpu"
    """Torch device."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Compute dtype; `auto` is bf16 where the device multiplies it natively, else fp32."""
    threads: int | None = Field(None, ge=1)
    """CPU threads; None: torch's own choice (all cores, or OMP_NUM_THREADS)."""


class DeviceConfig(Section):
    """One entry of `[[devices]]`: rank r of a run uses entry r."""

    device: str = "cpu"
    """Torch device."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of this rank; None: an even part of the cores."""
    budget: Size | None = None
    """As `memory.budget`, for this rank."""
    slowdown: float | tuple[tuple[int, float], ...] = 1.0
    """Computing takes so many times as long (the rank sleeps): a stand-in for a slower device. Or pairs of a step (from
    0) and the factor from that step on, such as [[0, 1.0], [10, 2.0]]."""

    @model_validator(mode="after")
    def _check(self) -> DeviceConfig:
        factors = [self.slowdown] if isinstance(self.slowdown, float) else [factor for _, factor in self.slowdown]
        if not factors or min(factors) < 1:
            raise ValueError(f"slowdown must be 1 or more, got {self.slowdown}")
        return self


class SplitConfig(Section):
    kind: Literal["auto", "tokens", "stages", "experts"] = "auto"
    """`tokens`: every device walks all layers over its share of a step's sequences; `stages`: each has a run of layers;
    `experts`: each has a part of every layer's experts and attention heads; `auto`: the fastest that fits."""
    stages: tuple[int, ...] | None = None
    """With `stages`: devices per stage, in order, such as [2, 1]; several in one stage share its sequences. None: found."""
    layers: tuple[int, ...] | None = None
    """With `stages`: layers per stage. None: found."""
    shares: tuple[float, ...] | None = None
    """Share of the work of each device (within its stage); None: by measured speed."""
    groups: int | None = Field(None, ge=1)
    """With `stages`: groups of micro-batches in flight; None: found."""
    rebalance: bool = True
    """Adapt shares (and layers per stage) to measured step times. Changes the result by rounding alone; False with
    `shares` given makes runs repeat bit for bit."""
    gather: Literal["auto", "never", "always"] = "auto"
    """Each device reads 1/N of a streamed layer and gets the rest from its peers; `auto`: where peer links are faster."""


class LaunchConfig(Section):
    restarts: int = Field(3, ge=0)
    """How often all local ranks are started again, from the last checkpoint, when one of them is lost. Under `torchrun`
    its own --max-restarts counts."""


class TraceConfig(Section):
    steps: int = Field(5, ge=0)
    """Last steps that `trace.json` shows; 0: no trace."""


class CheckpointConfig(Section):
    every_steps: int = Field(50, ge=0)
    """Save adapter, optimizer and position every so many steps; 0: only at the end. A checkpoint becomes complete
    beside the next step."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept besides the best one."""


class ValidationConfig(Section):
    data: tuple[Path, ...] = ()
    """JSONL rows whose loss is measured during training; empty: none."""
    every_steps: int = Field(50, ge=1)
    """Measure every so many steps."""
    metric: str = "loss"
    """Metric that chooses the best checkpoint."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Direction of `metric`; `auto` knows loss and perplexity (min), accuracy and F1 (max)."""


class TrackConfig(Section):
    project: str = Field("lamella", min_length=1)
    """Name of the project (MLflow: experiment) under which trackers show the run."""
    mlflow_uri: str | None = None
    """MLflow's tracking server or database; None: `mlflow.db` in `runs_dir`."""


class RunConfig(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; artifacts go to `<runs_dir>/<name>`."""
    runs_dir: Path = Path("runs")
    """Folder that holds runs."""
    store: Path
    """Layer store made by `lamella quantize`."""
    init_adapter: Path | None = None
    """Adapter folder, of any layout that is read (PEFT, Unsloth, vLLM, SGLang, mlx-lm), to go on from."""
    data: DataConfig = DataConfig()
    """What to train on."""
    lora: LoraConfig = LoraConfig()
    """The adapter."""
    train: TrainConfig = TrainConfig()
    """Optimizer and schedule."""
    memory: MemoryConfig = MemoryConfig()
    """Residency and recompute."""
    compute: ComputeConfig = ComputeConfig()
    """Device and dtype."""
    devices: tuple[DeviceConfig, ...] = ()
    """One entry per rank; empty: `compute` says it, or every visible GPU is one."""
    split: SplitConfig = SplitConfig()
    """How several devices share the work."""
    launch: LaunchConfig = LaunchConfig()
    """Starting local ranks."""
    trace: TraceConfig = TraceConfig()
    """What each device spends its time on."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    validation: ValidationConfig = ValidationConfig()
    """Measuring while training."""
    log: tuple[Literal["tensorboard", "mlflow", "trackio", "wandb"], ...] = ()
    """Trackers that get the run's figures as they come; each has to be installed."""
    track: TrackConfig = TrackConfig()
    """How trackers are to show it."""

    def for_rank(self, rank: int) -> RunConfig:
        """The same with this rank's own device, threads and budget, where `devices` says them."""
        if not self.devices:
            return self
        own = self.devices[rank]
        compute = self.compute.model_copy(update={"device": own.device, "threads": own.threads or self.compute.threads})
        memory = self.memory.model_copy(update={"budget": own.budget or self.memory.budget})
        return self.model_copy(update={"compute": compute, "memory": memory})


def _section_at(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is None:
            break
        inner = field.annotation
        options = [a for a in (inner, *get_args(inner)) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not options:
            break
        model = options[0]
    return model


def explain_validation(error: ValidationError, path: Path | None, root: type[BaseModel]) -> UserError:
    """A pydantic error as one `UserError` naming every bad key, unknown ones with the nearest valid name."""
    problems: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    fix = "correct the value"
    for item in error.errors():
        names: list[str] = []
        for part in item["loc"]:
            if names and _field(root, names) is not None and not _is_section(root, names):
                break  # parts behind a field's name say which option of its type was tried, or which element is wrong
            names.append(str(part))
        name = ".".join(names)
        if item["type"] == "extra_forbidden":
            valid = list(_section_at(root, item["loc"][:-1]).model_fields)
            near = difflib.get_close_matches(str(item["loc"][-1]), valid, n=1, cutoff=0.0)
            problems[name] = [f"unknown key `{name}`; nearest valid name: `{near[0]}`"]
            fix = f"valid keys there: {', '.join(valid)}"
        elif item["type"] == "missing":
            problems[name] = [f"`{name}` is required"]
            fix = f"set `{name}`"
        else:
            values.setdefault(name, item["input"])
            problems.setdefault(name, []).append(item["msg"])
    lines = [
        _line(name, values[name], " or ".join(dict.fromkeys(messages))) if name in values else messages[0]
        for name, messages in problems.items()
    ]
    return UserError("\n  ".join(lines), fix=fix, path=path)


def _line(name: str, value: Any, said: str) -> str:
    """A bad value; of a whole table the message alone, which names what in it is wrong."""
    if isinstance(value, dict | bytes):
        return f"`{name}`: {said.removeprefix('Value error, ')}" if name else said.removeprefix("Value error, ")
    return f"`{name}` = {value!r}: {said}"


def _field(root: type[BaseModel], names: list[str]) -> Any:
    return _section_at(root, tuple(names[:-1])).model_fields.get(names[-1])


def _is_section(root: type[BaseModel], names: list[str]) -> bool:
    return _section_at(root, tuple(names)) is not _section_at(root, tuple(names[:-1]))


def _override(tree: dict[str, Any], text: str) -> None:
    key, sign, raw = text.partition("=")
    key = key.strip().lstrip("-")
    if not sign or not key:
        raise UserError(f"not an override: {text!r}", fix="write dotted.key=value, e.g. train.steps=100")
    try:
        value = tomllib.loads(f"v = {raw.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()  # an unquoted word is a string
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"override {key!r}: `{parent}` is a value, not a table", fix="check the dotted name")
        node = child
    node[leaf] = value


_PATHS = (("store",), ("runs_dir",), ("init_adapter",), ("data", "train"), ("data", "chat_template"),
          ("validation", "data"))  # fmt: skip


def anchor(tree: dict[str, Any], folder: Path) -> None:
    """Make paths of a file relative to that file's folder."""
    for *parents, leaf in _PATHS:
        node: Any = tree
        for parent in parents:
            node = node.get(parent, {}) if isinstance(node, dict) else {}
        value = node.get(leaf) if isinstance(node, dict) else None
        if isinstance(value, str):
            value = node[leaf] = [value] if leaf in ("train", "data") else value
        if isinstance(value, str):
            node[leaf] = str(folder / value)
        elif isinstance(value, list):
            node[leaf] = [str(folder / v) if isinstance(v, str) else v for v in value]


def read_toml(path: Path, name: str) -> dict[str, Any]:
    """A TOML file's tree.

    Args:
        name: what such a file is called, for the error.

    Raises:
        UserError: no such file, not text, not TOML (with line).
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise UserError("no such file", fix=f"give the path of a {name}", path=path) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}", fix="see https://toml.io", path=path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot be read: {error}", fix="give a text file in UTF-8 that you may read", path=path
        ) from error


Checked = TypeVar("Checked", bound=BaseModel)


def checked(model: type[Checked], tree: Any, path: Path | None = None) -> Checked:
    """A tree as a configuration; through JSON, where strict types still take a string for a path and a list for a tuple.

    Raises:
        UserError: names every bad key, unknown ones with the nearest valid name.
    """
    try:
        return model.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise explain_validation(error, path, model) from error


def load_run_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read `run.toml`, apply `dotted.key=value` overrides, check everything.

    Paths in the file are relative to the file; paths in overrides to the working folder.

    Raises:
        UserError: no such file, not TOML (with line), unknown key, bad value.
    """
    tree = read_toml(path, "run.toml")
    anchor(tree, path.parent)
    return build_run_config(merge(tree, read_overrides(overrides or [])), path)


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`dotted.key=value` texts as a tree. Raises `UserError` for what is not one."""
    tree: dict[str, Any] = {}
    for item in overrides:
        _override(tree, item)
    anchor(tree, Path())
    return tree


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


def differences(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted settings that differ between two resolved configs: name -> (saved, now)."""
    a, b = flat(saved), flat(now)
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def build_run_config(tree: dict[str, Any], path: Path | None = None) -> RunConfig:
    """Check a configuration tree. Raises `UserError` naming every bad key."""
    return checked(RunConfig, tree, path)
