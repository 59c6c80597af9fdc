"""A checkpoint into a layer store: plan every byte, check everything, then stream.

Nothing appears under the store's name until it is complete: work goes to `STORE.partial/`, whose finished
files a later run keeps, and one rename ends it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lamella import __version__
from lamella.checkpoint.defaults import defaulted
from lamella.checkpoint.facts import Layout, classify_in_layer, classify_outer
from lamella.checkpoint.fingerprint import fingerprint
from lamella.checkpoint.gguf import is_gguf
from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.marks import plain_config
from lamella.checkpoint.source import INDEX_NAME, Checkpoint
from lamella.checkpoint.tied import Tying, find_tying
from lamella.console import notice, progress
from lamella.errors import UserError
from lamella.files import file_checksum, free_bytes, fsync_path, write_bytes, write_json
from lamella.store.formats import Chooser, Formats, NativeOf
from lamella.store.gguf_files import write_gguf_files
from lamella.store.journal import JOURNAL_NAME, Journal, check_writable, partial_path
from lamella.store.layout import PlannedGroup, Wanted, plan_group
from lamella.store.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    CopiedFile,
    Group,
    Manifest,
    TensorRecord,
    manifest_bytes,
)
from lamella.store.report import report_notices, report_rows
from lamella.units import format_bytes

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "chat_templates/*.jinja")
_SPARE_BYTES = 64 << 20
"""Room asked for beside the weights: manifest, tokenizer, the file system's own."""


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    block_size: int = 64
    """Elements per scale."""
    double_quant: bool = True
    """Quantise the scales themselves to 8 bits."""
    kept_dtype: Literal["source", "bf16"] = "source"
    """Dtype of float tensors that stay unquantised."""
    formats: Formats = field(default_factory=Formats)
    """What other formats than NF4 were asked for."""


@dataclass(frozen=True)
class Plan:
    """Everything about a store before it is written."""

    groups: list[PlannedGroup]
    tying: Tying
    notices: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


def plan_store(checkpoint: Checkpoint, settings: QuantizeSettings) -> Plan:
    """Class, format and place of every tensor.

    Raises:
        UserError: a weight to be quantised is not bf16, fp16 or fp32; no embeddings; rules of formats that do nothing.
    """
    layout = checkpoint.layout
    tying = find_tying(checkpoint)
    groups = plan_groups(layout, checkpoint.facts.num_experts, settings, tying.drop, checkpoint.native)
    notices = [tying.conflict] if tying.conflict else []
    notices += checkpoint.notices
    notices += defaulted(checkpoint.config, checkpoint.path)
    if layout.beyond:
        nbytes = sum(t.nbytes for t in layout.beyond)
        notices.append(f"left out: {len(layout.beyond)} tensors ({format_bytes(nbytes)}) of multi-token prediction, "
                       f"past config.json's {len(layout.layers)} layers, first {layout.beyond[0].name}")  # fmt: skip
    return Plan(groups, tying, tuple(notices + report_notices(groups)))


def plan_groups(
    layout: Layout,
    num_experts: int | None,
    settings: QuantizeSettings,
    drop: TensorInfo | None = None,
    native_of: NativeOf | None = None,
) -> list[PlannedGroup]:
    """The store's files, "outer" first, without the tensor `drop`.

    Raises:
        UserError: see `Chooser`.
    """
    chooser = chooser_of(settings, native_of)
    groups = [plan_outer([t for t in layout.outer if t is not drop], chooser)]
    for i, tensors in enumerate(layout.layers):
        groups.append(plan_layer(i, tensors, f"{layout.prefix}.{i}.", num_experts, chooser))
    chooser.check()
    return groups


def chooser_of(settings: QuantizeSettings, native_of: NativeOf | None = None) -> Chooser:
    return Chooser(settings.formats, settings.block_size, settings.double_quant, settings.kept_dtype, native_of)


def plan_outer(tensors: Iterable[TensorInfo], chooser: Chooser) -> PlannedGroup:
    """The file of everything outside the layers."""
    kinds = [(t, classify_outer(t.name)) for t in tensors]
    return plan_group("outer", "outer.bin", [Wanted(t, kind, chooser.form(t, kind)) for t, kind in kinds])


def plan_layer(
    index: int, tensors: Iterable[TensorInfo], prefix: str, num_experts: int | None, chooser: Chooser
) -> PlannedGroup:
    """One layer's file. `prefix` stands before its tensors' names, with the dot after the index."""
    kinds = [(t, classify_in_layer(t.name.removeprefix(prefix), t.shape, num_experts)) for t in tensors]
    wanted = [Wanted(t, kind, chooser.form(t, kind)) for t, kind in kinds]
    return plan_group(str(index), f"layers/{index:05d}.bin", wanted)


def quantize_checkpoint(
    source: str | Path,
    store: Path,
    settings: QuantizeSettings | None = None,
    *,
    threads: int | None = None,
    check: Callable[[Path, bool, dict[str, tuple[int, ...]]], None] | None = None,
) -> Manifest:
    """Make the layer store `store` from a checkpoint, or go on with an interrupted one.

    Args:
        source: checkpoint folder or hub id.
        store: folder to make; must not exist yet.
        threads: CPU threads of the kernels; None: torch's. bitsandbytes' offsets (a mean by torch) may differ
            in their last bit with another number of threads.

        check: called with the checkpoint's folder, whether its head is tied and the shapes of all tensors to be stored,
            before anything is written; refuses by raising.

    Raises:
        UserError: `store` exists or cannot be written, bad checkpoint, a partial store of another source or
            other settings, full disk, NaN or infinity in a weight.
    """
    settings = settings or QuantizeSettings()
    if store.exists() and not (store.is_dir() and not any(store.iterdir())):
        raise UserError("exists already", fix="give another -o STORE, or delete it first", path=store)
    check_writable(store)
    check_settings(settings)
    with Checkpoint.open(source) as checkpoint:
        plan = plan_store(checkpoint, settings)
        if check is not None:
            stored = [planned.tensor for group in plan.groups for planned in group.tensors]
            check(checkpoint.path, plan.tying.tied, {t.name: tuple(t.shape) for t in stored})
        for line in plan.notices:
            notice(line)
        head = journal_head(checkpoint, plan, settings)
        with Journal.open(store, head, plan.groups) as journal:
            _check_room(plan, journal)
            _stream(checkpoint, plan, journal, settings, threads)
            return _finish(source, checkpoint, plan, journal, settings, head["fingerprint"], store)


def check_settings(settings: QuantizeSettings) -> None:
    """Raises `UserError` for a block size that the format does not have."""
    if settings.block_size < 32 or settings.block_size > 4096 or settings.block_size & (settings.block_size - 1):
        raise UserError(f"block size {settings.block_size} is not a power of two from 32 to 4096", fix="use 64")


def journal_head(checkpoint: Checkpoint, plan: Plan, settings: QuantizeSettings) -> dict[str, Any]:
    """What is being made: a partial store goes on only if all of this is the same."""
    digest = fingerprint(checkpoint, plan.tying.tied)
    told = {**asdict(settings), "formats": settings.formats.model_dump(mode="json", exclude_defaults=True)}
    return {"format": FORMAT_VERSION, "lamella": __version__, "fingerprint": digest, **told}


def _check_room(plan: Plan, journal: Journal) -> None:
    needed = sum(group.nbytes for group in plan.groups if group.key not in journal.done) + _SPARE_BYTES
    free = free_bytes(journal.folder)
    if free < needed:
        if not journal.done:
            shutil.rmtree(journal.folder)
        raise UserError(f"disk has too little room: needs {format_bytes(needed)}, {format_bytes(free)} free",
                        fix="make room or choose another -o STORE", path=journal.folder)  # fmt: skip


def _stream(
    checkpoint: Checkpoint, plan: Plan, journal: Journal, settings: QuantizeSettings, threads: int | None
) -> None:
    from lamella.store.pipeline import run_pipeline

    pending = [group for group in plan.groups if group.key not in journal.done]
    if journal.done:
        notice(f"going on: {len(journal.done)} of {len(plan.groups)} files are done")
    total = sum(planned.tensor.nbytes for group in pending for planned in group.tensors)
    with progress("quantise", total, "B") as meter:
        try:
            run_pipeline(checkpoint, plan.groups, journal, advance=meter.advance, threads=threads)
        except KeyboardInterrupt:
            notice("stopped; the same command goes on where it was")
            raise


def _finish(
    source: str | Path,
    checkpoint: Checkpoint,
    plan: Plan,
    journal: Journal,
    settings: QuantizeSettings,
    digest: str,
    store: Path,
) -> Manifest:
    """Copy the small files, write the manifest, and give the folder its name."""
    from lamella.store.pipeline import disk_error

    partial = partial_path(store)
    try:
        for stray in partial.glob(".*.partial"):  # a kill in the middle of writing a small file
            stray.unlink()
        files = copy_files(checkpoint.path, checkpoint.config, plan.tying.tied, partial)
        groups = [group_record(planned, journal.done[planned.key], settings) for planned in plan.groups]
        manifest = Manifest(
            format_version=FORMAT_VERSION, checksum="0" * 32, lamella_version=__version__,
            source=str(source), source_fingerprint=digest,
            model_type=checkpoint.facts.model_type, num_layers=len(groups) - 1, layer_prefix=checkpoint.layout.prefix,
            tie_word_embeddings=plan.tying.tied, block_size=settings.block_size, double_quant=settings.double_quant,
            kept_dtype=settings.kept_dtype, notices=plan.notices, report=report_rows(plan.groups), files=files,
            outer=groups[0], layers=tuple(groups[1:]),
        )  # fmt: skip
        data = manifest_bytes(manifest)
        write_bytes(partial / MANIFEST_NAME, data)
        fsync_path(partial / "layers")
        fsync_path(partial)
        os.rename(partial, store)
        (store / JOURNAL_NAME).unlink()
        fsync_path(store.resolve().parent)
    except OSError as error:
        raise disk_error(error, partial, _SPARE_BYTES) from error
    return Manifest.model_validate_json(data)


def group_record(planned: PlannedGroup, checksums: Mapping[str, str], settings: QuantizeSettings) -> Group:
    """A planned file with the checksums of what was written."""
    tensors = []
    for p in planned.tensors:
        form = p.form
        own_block = form.format != "raw" and form.block_size != settings.block_size
        own_double = form.format == "nf4" and form.double_quant != settings.double_quant
        tensors.append(TensorRecord(
            name=p.tensor.name, tensor_class=p.tensor_class, shape=p.tensor.shape, dtype=p.dtype, format=p.format,
            parts=p.parts, checksum=checksums[p.tensor.name], block_size=form.block_size if own_block else None,
            double_quant=form.double_quant if own_double else None, order=form.order,
        ))  # fmt: skip
    return Group(file=planned.file, nbytes=planned.nbytes, tensors=tuple(tensors))


def copy_files(source: Path, model_config: dict[str, Any], tied: bool, partial: Path) -> dict[str, CopiedFile]:
    """Copy config, tokenizer and licence files; config.json gets the `tie_word_embeddings` in effect. A GGUF model's are made
    of its metadata."""
    if is_gguf(source):
        with tempfile.TemporaryDirectory() as made:
            write_gguf_files(source, model_config, Path(made))
            return copy_files(Path(made), model_config, tied, partial)
    copied: dict[str, CopiedFile] = {}
    for pattern in _COPIED:
        for file in sorted(source.glob(pattern)):
            name = str(file.relative_to(source))
            if name in copied or name in (MANIFEST_NAME, INDEX_NAME) or not file.is_file():
                continue
            target = partial / name
            target.parent.mkdir(exist_ok=True)
            config = corrected_config(model_config, tied) if name == "config.json" else None
            if config is None:
                shutil.copyfile(file, target)
            else:
                write_json(target, config, indent=2)
            copied[name] = CopiedFile(nbytes=target.stat().st_size, checksum=file_checksum(target))
    return copied


def corrected_config(config: dict[str, Any], tied: bool) -> dict[str, Any] | None:
    """config.json with the tying in effect and no mark of packed weights, or None where it is so already.

    A `text_config` of no model type of its own describes no inner model: its keys move to the top, where they are read.
    """
    given, config = config, plain_config(config)
    nested = config.get("text_config")
    if isinstance(nested, dict) and nested.get("model_type") in (None, config.get("model_type")):
        top = {key: value for key, value in config.items() if key != "text_config"}
        return {**top, **nested, "tie_word_embeddings": tied}
    wrong_inside = isinstance(nested, dict) and nested.get("tie_word_embeddings", tied) is not tied
    if config.get("tie_word_embeddings") is tied and not wrong_inside:
        return None if config == given else config
    new = {**config, "tie_word_embeddings": tied}
    if isinstance(nested, dict):
        new["text_config"] = {**nested, "tie_word_embeddings": tied}
    return new
