"""A model's shape, from a config.json, a checkpoint's headers, or a layer store. No weight is read.

Active parameters are those whose products a token passes: its experts, shared experts, everything else in the layers, and
the head (a tied table counts as the head); the embedding, a look-up, does not count. So OpenAI counts for GPT-OSS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from lamella.checkpoint.architecture import (
    Architecture,
    architecture_of,
    is_tied,
    keys_of,
    known_family,
    refuse_encoder,
)
from lamella.checkpoint.decode import decoder_of
from lamella.checkpoint.facts import (
    QUANTISED_CLASSES,
    classify_in_layer,
    classify_outer,
    layout_of,
    model_facts,
    num_routed_experts,
)
from lamella.checkpoint.families import FAMILIES, layer_kinds
from lamella.checkpoint.header import DTYPE_BYTES, TensorInfo
from lamella.checkpoint.keys import Keys
from lamella.checkpoint.kinds import FULL
from lamella.checkpoint.packed import DiskRule, disk_rule, unpacked
from lamella.checkpoint.packing import Native, Packing, Read
from lamella.checkpoint.reader import Reader
from lamella.checkpoint.shapes import check_experts, check_shapes
from lamella.checkpoint.source import HUB_ID, read_json, read_tensors
from lamella.errors import UserError
from lamella.forecast.cores import core_of
from lamella.forecast.matrices import Held, matrices_of
from lamella.forecast.shape import LayerShape, ModelShape
from lamella.store.formats import Formats, NativeOf
from lamella.store.manifest import ITEM_BYTES, MANIFEST_NAME, Group, Manifest, is_weight, read_manifest
from lamella.store.quantize import QuantizeSettings, check_settings, chooser_of, plan_layer, plan_outer

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_LENGTH_KEYS = ("max_position_embeddings", "max_sequence_length", "seq_length")


def shape_of(
    model: str | Path, *, block_size: int = 64, double_quant: bool = True, formats: Formats | None = None
) -> ModelShape:
    """What a model is made of.

    Args:
        model: a config.json, a checkpoint's folder (its headers are read; without weights, its config.json alone), a layer
            store, or a hub id (config.json and headers are read through byte ranges).
        block_size, double_quant, formats: of the store that is to be made; a store's own are what they are.

    Raises:
        UserError: formats asked of a store, or rules of theirs that do nothing.
        UserError: nothing there, unknown architecture, contradictory or broken config.json, damaged headers.
    """
    asked = formats or Formats()
    settings = QuantizeSettings(block_size=block_size, double_quant=double_quant, formats=asked)
    check_settings(settings)
    path = Path(model)
    if path.is_file():
        return _by_rules(str(model), read_json(path), path, settings)
    if path.is_dir():
        if (path / MANIFEST_NAME).is_file():
            if asked != Formats():
                raise UserError("is a store, whose formats are what they are", fix="leave --formats out", path=path)
            return shape_of_store(path, read_manifest(path))
        config = read_json(path / "config.json")
        if any(path.glob("*.safetensors")):
            return _by_headers(str(model), config, path, settings)
        told = ("no weights in the folder: shapes follow from config.json",)
        return replace_notes(_by_rules(str(model), config, path / "config.json", settings), told)
    if not HUB_ID.fullmatch(str(model)):
        raise UserError("no such file or folder", fix="give a config.json, a checkpoint's folder, a store, or a hub id "
                        "such as owner/name", path=path)  # fmt: skip
    from lamella.checkpoint.remote import read_remote

    remote = read_remote(str(model))
    if remote.tensors is None:
        return replace_notes(_by_rules(str(model), remote.config, remote.config_path, settings), remote.notes)
    found = _by_tensors(str(model), remote.config, list(remote.tensors), remote.config_path, settings)
    return replace_notes(found, remote.notes)


def replace_notes(shape: ModelShape, first: Iterable[str]) -> ModelShape:
    return replace(shape, notes=(*first, *shape.notes))


def check_length(shape: ModelShape, tokens: int) -> None:
    """Raises `UserError` where a sequence of `tokens` is longer than the model was made for."""
    if shape.max_tokens is not None and tokens > shape.max_tokens:
        raise UserError(f"sequences of {tokens} tokens, {shape.name} was made for {shape.max_tokens}",
                        fix=f"cut the data, or use at most {shape.max_tokens} tokens")  # fmt: skip


# ---- the three ways --------------------------------------------------------------------------------


@dataclass
class _Parts:
    """A model's real weights, sorted, before they are summed up.

    `layers`: what stands before the names of a layer's tensors, and these; parallel to `kinds`.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    prefix: str
    layers: Sequence[tuple[str, Sequence[TensorInfo]]]
    outer: list[TensorInfo]
    beyond: list[TensorInfo]
    kinds: Sequence[str]
    tied: bool
    keys: Keys
    notes: list[str] = field(default_factory=list)


def _by_rules(name: str, config: Mapping[str, Any], path: Path, settings: QuantizeSettings) -> ModelShape:
    found = architecture_of(config, path)
    dtype, on_disk = _dtype(config), disk_rule(config)
    keys = keys_of(config, path)
    experts = num_routed_experts(config) or keys.experts()
    item = DTYPE_BYTES[dtype]
    outer = [TensorInfo(n, path, dtype, s, 0, prod(s) * item) for n, s in found.outer.items()]
    beyond = _on_disk(
        "", {n: (s, _is_linear(_rest(n), s, experts)) for n, s in found.beyond.items()}, path, dtype, on_disk
    )
    layers = _layers_of(found, path, dtype, on_disk, experts, apart=bool(settings.formats.names))
    notes = [on_disk.note] if on_disk.note else []
    if found.assumed:
        values = ", ".join(f"{key} = {value}" for key, value in sorted(found.assumed.items()))
        notes.append(f"config.json leaves out, so the family's defaults were taken: {values}")
    if isinstance(config.get("text_config"), Mapping):
        notes.append("the decoder alone: vision and audio parts do not follow from config.json")
    return _shape(_Parts(name, "config.json", config, found.prefix, layers, outer, beyond, found.kinds, found.tied, keys, notes),
                  settings, _native_of(None))  # fmt: skip


def _layers_of(
    found: Architecture, path: Path, dtype: str, on_disk: DiskRule, experts: int | None, apart: bool
) -> list[tuple[str, Sequence[TensorInfo]]]:
    """Tensors of each layer. Layers alike share one list under the first one's names, unless their bytes differ or `apart`."""
    seen: dict[Any, tuple[str, Sequence[TensorInfo]]] = {}
    linear: dict[Any, dict[str, tuple[tuple[int, ...], bool]]] = {}
    layers = []
    for i, tensors in enumerate(found.layers):
        start, alike = f"{found.prefix}.{i}.", tuple(tensors.items())
        key = (alike, i if on_disk.by_layer or apart else None)
        if alike not in linear:
            linear[alike] = {rest: (shape, _is_linear(rest, shape, experts)) for rest, shape in alike}
        if key not in seen:
            seen[key] = start, _on_disk(start, linear[alike], path, dtype, on_disk)
        layers.append(seen[key])
    return layers


def _on_disk(
    start: str, tensors: Mapping[str, tuple[tuple[int, ...], bool]], path: Path, dtype: str, rule: DiskRule
) -> list[TensorInfo]:
    item = DTYPE_BYTES[dtype]
    found = []
    for rest, (shape, linear) in tensors.items():
        info = TensorInfo(start + rest, path, dtype, shape, 0, rule.nbytes(start + rest, shape, linear, item))
        if rule.method == "mxfp4" and info.nbytes != prod(shape) * item:
            info = replace(info, packing=Packing("mxfp4", {"blocks": info, "scales": info}, {"order": ()}))
        found.append(info)
    return found


def _native_of(read: Read | None) -> NativeOf:
    """Which form a store would take over; `read`: of the files, None where they are not at hand."""

    def unread(tensor: TensorInfo, start: int, buffer: memoryview) -> None:
        raise AssertionError(f"{tensor.name} is not at hand")

    def native(tensor: TensorInfo) -> Native | None:
        header_tells = tensor.packing is not None and tensor.packing.method in ("mxfp4", "gguf")
        return decoder_of(tensor, read or unread).native() if read is not None or header_tells else None

    return native


def _is_linear(rest: str, shape: tuple[int, ...], experts: int | None) -> bool:
    return classify_in_layer(rest, shape, experts) in QUANTISED_CLASSES


def _rest(name: str) -> str:
    """A layer's tensor without `model.layers.7.`."""
    return name.split(".", 3)[-1]


def _dtype(config: Mapping[str, Any]) -> str:
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    named = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    return _DTYPES.get(str(named or "bfloat16").removeprefix("torch."), "BF16")


def _by_headers(name: str, config: Mapping[str, Any], path: Path, settings: QuantizeSettings) -> ModelShape:
    found, disagreement = read_tensors(path)
    if disagreement:
        raise disagreement
    with closing(Reader()) as reader:
        return _by_tensors(name, config, found, path / "config.json", settings, reader.read_into)


def _by_tensors(
    name: str,
    config: Mapping[str, Any],
    tensors: list[TensorInfo],
    path: Path,
    settings: QuantizeSettings,
    read: Read | None = None,
) -> ModelShape:
    refuse_encoder(config, path)
    facts = model_facts(config, path)
    real = unpacked(tensors, config, read)
    check_shapes(real, facts, config, path)
    layout = layout_of({t.name: t for t in real}, facts, path)
    check_experts(layout, facts, path)
    keys = keys_of(config, path)
    keys.active()
    head = next((t for t in layout.outer if classify_outer(t.name) == "head" and len(t.shape) == 2), None)
    notes = []
    tied = head is None
    if head is not None and is_tied(config, keys):
        tied = True
        notes.append(f"{head.name} is in the files, and config.json ties it to the embeddings: taken as a copy")
    outer = [t for t in layout.outer if not (tied and t is head)]
    family = known_family(config)
    if family is None:
        notes.append(f"model_type {facts.model_type!r} is not known: weights are named and counted as their names tell")
    kinds = layer_kinds(keys, FAMILIES[family]) if family else _said_kinds(keys, facts.num_layers)
    layers = [(f"{layout.prefix}.{i}.", tensors) for i, tensors in enumerate(layout.layers)]
    return _shape(_Parts(name, "headers", config, layout.prefix, layers, outer, list(layout.beyond), kinds, tied, keys, notes),
                  settings, _native_of(read), head if tied else None)  # fmt: skip


def _said_kinds(keys: Keys, layers: int) -> list[str]:
    """`layer_types`, or every layer sees all."""
    return keys.by_layer("layer_types") or [FULL] * layers


def shape_of_store(path: Path, manifest: Manifest) -> ModelShape:
    """What the model of a store is made of, from its manifest, which takes a second to read where a layer has hundreds of
    matrices.

    Raises:
        UserError: config.json is missing, broken or contradictory.
    """
    config = read_json(path / "config.json")
    keys = keys_of(config, path / "config.json")
    family = known_family(config)
    kinds = layer_kinds(keys, FAMILIES[family]) if family else _said_kinds(keys, manifest.num_layers)
    builder = _Builder(config, keys, num_routed_experts(config))
    layers = []
    for i, (group, kind) in enumerate(zip(manifest.layers, kinds, strict=True)):
        start = f"{manifest.layer_prefix}.{i}."
        held = tuple(
            Held(r.name.removeprefix(start), r.shape, r.tensor_class, is_weight(r.format, r.tensor_class))
            for r in group.tensors
        )
        layers.append(builder.layer(held, kind, _source_bytes(group), group.nbytes, _raw_bytes(group)))
    outer = [(r.name, r.tensor_class, r.numel) for r in manifest.outer.tensors]
    source_bytes = sum(row.bytes_source for row in manifest.report)
    return builder.model(str(path), "store", layers, outer, 0, manifest.tie_word_embeddings, source_bytes, manifest.outer.nbytes,
                         ["random weights: of no use but to measure"] if manifest.synthetic else [])  # fmt: skip


def _source_bytes(group: Group) -> int:
    return sum(r.numel * ITEM_BYTES[r.dtype] for r in group.tensors)


def _raw_bytes(group: Group) -> int:
    return sum(r.nbytes for r in group.tensors if not is_weight(r.format, r.tensor_class))


# ---- sums ------------------------------------------------------------------------------------------


def _shape(
    parts: _Parts, settings: QuantizeSettings, native_of: NativeOf, dropped: TensorInfo | None = None
) -> ModelShape:
    """Layers planned as `quantize` would lay them out, one of each kind."""
    experts = num_routed_experts(parts.config) or parts.keys.experts()
    builder = _Builder(parts.config, parts.keys, experts)
    layers = []
    chooser = chooser_of(settings, native_of)
    apart = bool(settings.formats.names)
    seen: dict[Any, LayerShape] = {}
    for i, ((start, tensors), kind) in enumerate(zip(parts.layers, parts.kinds, strict=True)):
        key = (kind, i if apart else None,
               tuple((t.name.removeprefix(start), t.shape, t.dtype, t.nbytes) for t in tensors))  # fmt: skip
        if key not in seen:
            planned = plan_layer(i, tensors, start, experts, chooser)
            weights = [is_weight(p.format, p.tensor_class) for p in planned.tensors]
            held = tuple(Held(p.tensor.name.removeprefix(start), p.tensor.shape, p.tensor_class, weight)
                         for p, weight in zip(planned.tensors, weights, strict=True))  # fmt: skip
            raw = sum(n for p, weight in zip(planned.tensors, weights, strict=True) if not weight
                      for _, n in p.parts.values())  # fmt: skip
            seen[key] = builder.layer(held, kind, sum(t.nbytes for t in tensors), planned.nbytes, raw)
        layers.append(seen[key])
    root = parts.prefix.rpartition(".")[0]
    outer = [t for t in parts.outer if t.name.startswith(f"{root}.") or classify_outer(t.name) == "head"]
    foreign = [t for t in parts.outer if t not in outer] + parts.beyond
    everything = [
        *(t for _, layer in parts.layers for t in layer),
        *parts.outer,
        *parts.beyond,
        *([dropped] if dropped else []),
    ]
    notes = list(parts.notes)
    if foreign:
        notes.append(f"left out: {len(foreign)} tensors that are not trained, first {foreign[0].name}")
    counted = [(t.name, classify_outer(t.name), t.numel) for t in outer]
    outer_bytes = plan_outer(outer, chooser).nbytes
    chooser.check()
    return builder.model(parts.name, parts.source, layers, counted, sum(t.numel for t in foreign), parts.tied,
                         sum(t.nbytes for t in everything), outer_bytes, notes)  # fmt: skip


class _Builder:
    """Makes layers, keeping sums of parameters by class."""

    def __init__(self, config: Mapping[str, Any], keys: Keys, experts: int | None) -> None:
        self.model_type = str(keys.config.get("model_type") or config.get("model_type"))
        self.family = known_family(config) or self.model_type
        self.keys, self.experts = keys, experts
        self.active = keys.active()
        self.parameters: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self._counts: dict[int, tuple[Counter[str], Counter[str]]] = {}

    def layer(self, held: tuple[Held, ...], kind: str, on_disk: int, nbytes: int, raw: int) -> LayerShape:
        matrices = matrices_of(held, self.family, self.keys.size("hidden_size"), self.active)
        by_class, passed = Counter[str](), Counter[str]()
        for tensor in held:
            numel = prod(tensor.shape)
            by_class[tensor.kind] += numel
            routed = "experts" in tensor.name.split(".")
            passed[tensor.kind] += numel * self.active // (self.experts or 1) if routed else numel
        shape = LayerShape(matrices, core_of(self.keys, kind, matrices), sum(by_class.values()) - sum(m.parameters for m in matrices),
                           on_disk, nbytes, raw)  # fmt: skip
        self._counts[id(shape)] = by_class, passed
        return shape

    def model(
        self, name: str, source: str, layers: Sequence[LayerShape], outer: Sequence[tuple[str, str, int]], beyond: int,
        tied: bool, on_disk: int, outer_bytes: int, notes: Sequence[str],
    ) -> ModelShape:  # fmt: skip
        for layer in layers:
            by_class, passed = self._counts[id(layer)]
            self.parameters += by_class
            self.passed += passed
        for _, kind, numel in outer:
            self.parameters[kind] += numel
            self.passed[kind] += 0 if kind == "embedding" else numel
        table = sum(n for _, kind, n in outer if kind == "embedding")
        head = sum(n for _, kind, n in outer if kind == "head")
        hidden, vocab = self.keys.size("hidden_size"), self.keys.size("vocab_size")
        if tied:
            self.passed["head"] += vocab * hidden
        lengths = [self.keys.maybe(key) for key in _LENGTH_KEYS]
        return ModelShape(
            name=name, model_type=self.model_type, source=source, hidden=hidden, vocab=vocab,
            max_tokens=next((n for n in lengths if n), None), tied=tied, layers=tuple(layers), embedding_parameters=table,
            head_parameters=head, outer_parameters=sum(n for _, _, n in outer) - table - head, beyond_parameters=beyond,
            parameters=dict(+self.parameters), active=dict(+self.passed), checkpoint_bytes=on_disk,
            outer_store_bytes=outer_bytes, notes=tuple(notes),
        )  # fmt: skip
