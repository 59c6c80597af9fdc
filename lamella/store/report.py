"""What quantising did to each class of tensors, told by name, count and bytes. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lamella.checkpoint.facts import QUANTISED_CLASSES, TensorClass, expert_pattern
from lamella.store.layout import Planned, PlannedGroup
from lamella.store.manifest import Manifest, ReportRow, TensorFormat
from lamella.units import format_bytes, format_count

_ORDER: tuple[TensorClass, ...] = (
    "attention",
    "mlp",
    "experts",
    "router",
    "norm",
    "bias",
    "embedding",
    "head",
    "other",
)


def report_rows(groups: Iterable[PlannedGroup]) -> tuple[ReportRow, ...]:
    """One row for each class, format and dtype.

    A scale table shared by a file's tensors is counted once.
    """
    tables = 0
    items: list[Planned] = []
    for group in groups:
        tables += 1024 * len({p.parts["absmax_code"] for p in group.tensors if "absmax_code" in p.parts})
        items += group.tensors

    def key(planned: Planned) -> tuple[int, TensorFormat, str]:
        return _ORDER.index(planned.tensor_class), planned.format, planned.dtype

    rows = []
    for (order, kind, dtype), members in groupby(sorted(items, key=key), key):
        found = list(members)
        parameters = sum(p.tensor.numel for p in found)
        store = sum(n for p in found for part, (_, n) in p.parts.items() if part != "absmax_code")
        if kind == "nf4":  # the first nf4 row carries the tables
            store, tables = store + tables, 0
        rows.append(ReportRow(
            tensor_class=_ORDER[order], format=kind, dtype=dtype, count=len(found), parameters=parameters,
            bytes_source=sum(p.tensor.nbytes for p in found), bytes_store=store,
            bytes_per_weight=round(store / max(parameters, 1), 4),
            names=tuple(sorted({expert_pattern(p.tensor.name) for p in found})),
        ))  # fmt: skip
    return tuple(rows)


def report_notices(groups: Iterable[PlannedGroup]) -> list[str]:
    """Lines that must be seen: weights of decoder layers that did not become 4-bit, and fp32 that stays."""
    groups = list(groups)
    layers = [p for group in groups if group.key != "outer" for p in group.tensors]
    everything = sum(p.tensor.numel for p in layers)
    lines = [*_left_whole(groups), *_taken_over(layers)]
    left: dict[str, int] = {}
    for planned in layers:
        if planned.format == "raw" and len(planned.tensor.shape) >= 2 and planned.tensor_class == "other":
            pattern = expert_pattern(planned.tensor.name)
            left[pattern] = left.get(pattern, 0) + planned.tensor.numel
    if left:
        share = 100 * sum(left.values()) / everything
        lines.append(f"NOT QUANTISED: {share:.2g} % of the decoder layers' weights stay in their source dtype, "
                     f"being of no known kind: {', '.join(left)}")  # fmt: skip
    unknown = sorted({expert_pattern(p.tensor.name) for p in layers if p.tensor_class == "other"} - set(left))
    if unknown:
        lines.append(f"kept as they are, of no known kind: {', '.join(unknown)}")
    wide = sum(n for group in groups for p in group.tensors if p.format == "raw" and p.dtype == "float32"
               for _, n in p.parts.values())  # fmt: skip
    if wide:
        lines.append(f"{format_bytes(wide)} of kept tensors are fp32 as in the source (--kept-dtype bf16 halves them)")
    return lines


def _left_whole(groups: Iterable[PlannedGroup]) -> list[str]:
    """Weights that could be quantised and are not, as was asked: by class and dtype, with their share of all weights."""
    every = [p for group in groups for p in group.tensors]
    total = sum(p.tensor.numel for p in every)
    left: dict[tuple[TensorClass, str], list[Planned]] = {}
    for p in every:
        if p.format == "raw" and p.tensor_class in QUANTISED_CLASSES and p.tensor.numel:
            left.setdefault((p.tensor_class, p.dtype), []).append(p)
    lines = []
    for (kind, dtype), members in left.items():
        share = 100 * sum(p.tensor.numel for p in members) / total
        nbytes = sum(n for p in members for _, n in p.parts.values())
        names = sorted({expert_pattern(p.tensor.name) for p in members})
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"NOT QUANTISED, as asked: {len(members)} tensors of {kind} stay {dtype}: {share:.2g} % of all "
                     f"weights, {format_bytes(nbytes)}: {shown}")  # fmt: skip
    return lines


def _taken_over(layers: Iterable[Planned]) -> list[str]:
    """What keeps the form that it has in a quantised source, and what does not."""
    taken: dict[str, list[Planned]] = {}
    for p in layers:
        if p.form.native:
            taken.setdefault(p.format, []).append(p)
    lines = [
        f"{len(members)} tensors keep their source's {kind}, bit for bit, in blocks of "
        f"{' and '.join(map(str, sorted({p.form.block_size for p in members})))}"
        for kind, members in taken.items()
    ]
    again = Counter((p.tensor.packing.method, p.format) for p in layers
                    if p.tensor.packing is not None and not p.form.native and p.format != "raw")  # fmt: skip
    return lines + [f"{count} tensors are rounded a second time, from the source's {method} to {kind}"
                    for (method, kind), count in again.items()]  # fmt: skip


def report_table(rows: Iterable[ReportRow], title: str) -> Any:
    """The rows as a rich table, without names."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("class", "stored as", "tensors", "params", "before", "after", "B/weight"):
        table.add_column(name, justify="left" if name in ("class", "stored as") else "right", no_wrap=True)
    total = [0, 0, 0, 0]
    for row in rows:
        counts = (row.count, row.parameters, row.bytes_source, row.bytes_store)
        total = [a + b for a, b in zip(total, counts, strict=True)]
        table.add_row(row.tensor_class, _stored_as(row), *_cells(counts))
    table.add_section()
    table.add_row("all", "", *_cells(total))
    return table


def _stored_as(row: ReportRow) -> str:
    return row.dtype if row.format == "raw" else row.format


def _cells(counts: Sequence[int]) -> list[str]:
    count, parameters, before, after = counts
    weight = f"{after / max(parameters, 1):.3f}"
    return [str(count), format_count(parameters), format_bytes(before), format_bytes(after), weight]


def report_json(manifest: Manifest) -> dict[str, Any]:
    """What `--json` prints of a store."""
    return {
        "model_type": manifest.model_type, "layers": manifest.num_layers, "block_size": manifest.block_size,
        "double_quant": manifest.double_quant, "kept_dtype": manifest.kept_dtype, "synthetic": manifest.synthetic,
        "tie_word_embeddings": manifest.tie_word_embeddings, "source_fingerprint": manifest.source_fingerprint,
        "bytes": sum(group.nbytes for _, group in manifest.groups()), "notices": list(manifest.notices),
        "classes": [row.model_dump(mode="json") for row in manifest.report],
    }  # fmt: skip


def print_report(manifest: Manifest, store: Path) -> None:
    """Table, names of what is not quantised, notices and one closing line on stdout."""
    from lamella.console import out

    title = f"{manifest.model_type}, {manifest.num_layers} layers"
    formats = {row.format for row in manifest.report}
    if "nf4" in formats:
        scales = "double-quantised scales" if manifest.double_quant else "fp32 scales"
        title += f", NF4 blocks of {manifest.block_size}, {scales}"
    if "mxfp4" in formats:
        title += ", MXFP4 blocks of 32"
    if "int8" in formats:
        title += f", int8 blocks of {manifest.block_size}"
    out.print(report_table(manifest.report, title))
    for row in manifest.report:
        if row.format == "raw":
            out.print(f"stays {row.dtype}, {row.tensor_class}: {', '.join(row.names)}", markup=False)
    for line in manifest.notices:
        out.print(line, markup=False)
    nbytes = sum(group.nbytes for _, group in manifest.groups())
    out.print(f"{store}: {format_bytes(nbytes)}, source fingerprint {manifest.source_fingerprint}", markup=False)
