"""Which format each tensor of a store gets: by its class, by its name, or as it lies in a quantised source. No torch.

    [classes]
    experts = "mxfp4"          # experts, attention, mlp: nf4, mxfp4, int8, bf16 or source
    attention = "int8"
    head = "bf16"              # head, embedding: bf16 or source

    [[names]]                  # goes before [classes]; of several rules that match, the last counts
    match = "model.layers.0.*"
    format = "source"

A rule of names is about weights that can be quantised; routers, norms and biases that it sweeps along stay as they are.
Without a word, weights in 4 bits in the source (and bitsandbytes' int8) keep their own form, all others become NF4.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from lamella.checkpoint.facts import QUANTISED_CLASSES, TensorClass
from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.packing import Native
from lamella.errors import UserError
from lamella.store.manifest import MXFP4_BLOCK, TensorFormat

FormatName = Literal["nf4", "mxfp4", "int8", "bf16", "source"]
KeptName = Literal["bf16", "source"]
NativeOf = Callable[[TensorInfo], Native | None]
WHOLE: tuple[FormatName, ...] = ("bf16", "source")
TORCH_DTYPE = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip
"""safetensors dtype -> torch's name."""


@dataclass(frozen=True)
class Form:
    """How a tensor is stored.

    Attributes:
        dtype: torch's name: of a raw tensor's bytes, else of the values that it was made from.
        block_size: values per scale; 0 of a raw tensor.
        double_quant: NF4 whose scales are quantised themselves.
        order: see `Native.order`.
        native: its bytes are taken over from the source.
    """

    format: TensorFormat
    dtype: str
    block_size: int = 0
    double_quant: bool = False
    order: tuple[int, ...] = ()
    native: bool = False


def _no_router(value: Any) -> Any:
    raise ValueError("routers are never quantised: small errors flip the chosen experts; leave the key out")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ClassFormats(_Section):
    experts: FormatName | None = None
    attention: FormatName | None = None
    mlp: FormatName | None = None
    head: KeptName | None = None
    embedding: KeptName | None = None
    router: Annotated[None, BeforeValidator(_no_router)] = None


class NameRule(_Section):
    match: str
    """A tensor's name in the checkpoint; `*` stands for anything, dots too."""
    format: FormatName


class Formats(_Section):
    """quantize.toml."""

    classes: ClassFormats = ClassFormats()
    names: tuple[NameRule, ...] = ()


def read_formats(file: Path) -> Formats:
    """quantize.toml, checked.

    Raises:
        UserError: unreadable, no TOML, or a key or value that there is not (file and key).
    """
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", fix="give a TOML file", path=file) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"is not TOML: {error}", fix="correct the file", path=file) from error
    if isinstance(tree.get("names"), list):
        tree["names"] = tuple(tree["names"])
    try:
        return Formats.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        value = "" if first["type"] in ("missing", "extra_forbidden") else f" (it says {first['input']!r})"
        raise UserError(f"`{key}`: {first['msg']}{value}", fix="see `lamella quantize --help`", path=file) from error


class Chooser:
    """Chooses each tensor's form, and remembers which rules did anything.

    Args:
        formats: quantize.toml.
        kept: dtype of float tensors that stay unquantised.
        native_of: the form in which a tensor of a quantised source can be taken over; None: there are none.
    """

    def __init__(
        self, formats: Formats, block_size: int, double_quant: bool, kept: KeptName, native_of: NativeOf | None = None
    ) -> None:
        self.formats, self.block_size, self.double_quant, self.kept = formats, block_size, double_quant, kept
        self._native_of = native_of
        self._seen: set[TensorClass] = set()
        self._matched: list[set[TensorClass]] = [set() for _ in formats.names]

    def form(self, tensor: TensorInfo, kind: TensorClass) -> Form:
        """Raises:
        UserError: a weight to be quantised is not bf16, fp16 or fp32.
        """
        asked = self._asked(tensor, kind)
        if kind not in QUANTISED_CLASSES or tensor.numel == 0:
            return Form("raw", self._whole(tensor, asked))
        if tensor.dtype not in ("BF16", "F16", "F32"):
            raise UserError(f"tensor {tensor.name!r} is {tensor.dtype}, not bf16, fp16 or fp32",
                            fix="give a bf16, fp16 or fp32 checkpoint", path=tensor.file)  # fmt: skip
        if asked in WHOLE:
            return Form("raw", self._whole(tensor, asked))
        native = self._native(tensor)
        if native is not None and asked in (native.format, None) and (asked or _keeps(native, tensor)):
            double = "absmax_q" in native.parts
            return Form(native.format, TORCH_DTYPE[tensor.dtype], native.block_size, double, native.order, True)
        if asked == "mxfp4":
            return Form("mxfp4", TORCH_DTYPE[tensor.dtype], MXFP4_BLOCK)
        if asked == "int8":
            return Form("int8", TORCH_DTYPE[tensor.dtype], self.block_size)
        return Form("nf4", TORCH_DTYPE[tensor.dtype], self.block_size, self.double_quant)

    def check(self) -> None:
        """After all tensors.

        Raises:
            UserError: a rule that did nothing, or that names routers, or that would quantise what cannot be.
        """
        for name in ("experts", "attention", "mlp", "head", "embedding"):
            if getattr(self.formats.classes, name) is not None and name not in self._seen:
                raise UserError(f"`classes.{name}`: the model has no such tensors", fix="leave the key out")
        for number, (rule, kinds) in enumerate(zip(self.formats.names, self._matched, strict=True)):
            where = f"`names.{number}`: {rule.match!r}"
            if not kinds:
                raise UserError(f"{where} matches no tensor", fix="names are those of the checkpoint: see its index")
            if rule.format not in WHOLE and not kinds & QUANTISED_CLASSES:
                if "router" in kinds:
                    raise UserError(f"{where} names routers, which are never quantised: small errors flip the chosen "
                                    "experts", fix="leave the rule out")  # fmt: skip
                raise UserError(f"{where} matches {', '.join(sorted(kinds))} alone, which stay in 16 bit or more",
                                fix="say bf16 or source, or leave the rule out")  # fmt: skip

    def _native(self, tensor: TensorInfo) -> Native | None:
        return self._native_of(tensor) if self._native_of is not None and tensor.packing is not None else None

    def _asked(self, tensor: TensorInfo, kind: TensorClass) -> FormatName | None:
        self._seen.add(kind)
        asked: FormatName | None = getattr(self.formats.classes, kind, None)
        for rule, kinds in zip(self.formats.names, self._matched, strict=True):
            if fnmatchcase(tensor.name, rule.match):
                kinds.add(kind)
                asked = rule.format
        return asked

    def _whole(self, tensor: TensorInfo, asked: FormatName | None) -> str:
        own = TORCH_DTYPE[tensor.dtype]
        form = asked if asked in WHOLE else self.kept
        return "bfloat16" if form == "bf16" and own in ("float16", "float32") else own


def _keeps(native: Native, tensor: TensorInfo) -> bool:
    """Whether a source's own form is kept unasked: 4 bits, and int8 as bitsandbytes makes it."""
    method = tensor.packing.method if tensor.packing is not None else ""
    return native.format in ("nf4", "mxfp4") or method == "bnb-int8"
