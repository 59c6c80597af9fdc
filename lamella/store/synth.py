"""A layer store of random weights, made from a config.json alone: to measure sizes for which there are no weights here.

The format is that of `lamella quantize`. Codes are uniform random, so a weight's standard deviation is its scale
times the root mean square of their values; scales lie within 10 % (MXFP4's at the nearest power of two) of what gives

    0.02              input projections, experts' gate and up, head
    0.02 / sqrt(2 L)  weights that write into the hidden state (as GPT-2 is initialised), of L layers
    1                 embeddings (0.02 where the head is tied to them), so that tokens stay distinct through all layers
    1 and 0           norms and biases
    1 / sqrt(hidden)  routers: logits of about unit size, different for every token, so experts get like loads

Values depend on the seed, the tensor's name and nothing else. Memory: one chunk per thread.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lamella import __version__
from lamella.checkpoint.facts import ModelFacts, layout_of, model_facts
from lamella.checkpoint.header import DTYPE_BYTES, TensorInfo
from lamella.checkpoint.source import read_json
from lamella.console import progress
from lamella.errors import UserError
from lamella.files import file_checksum, free_bytes, fsync_path, write_bytes, write_json
from lamella.kernels.layout import MXFP4_TABLE, NF4_TABLE, dynamic_code
from lamella.store.journal import check_writable, partial_path
from lamella.store.layout import Planned, PlannedGroup
from lamella.store.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    CopiedFile,
    Manifest,
    manifest_bytes,
)
from lamella.store.quantize import (
    QuantizeSettings,
    check_settings,
    copy_files,
    corrected_config,
    group_record,
    plan_groups,
)
from lamella.store.report import report_notices, report_rows
from lamella.store.tokens import write_tokenizer
from lamella.units import format_bytes

STD = 0.02
_CHUNK_BYTES = 8 << 20
_SPARE_BYTES = 64 << 20
_RMS = {
    "nf4": math.sqrt(sum(float(v) ** 2 for v in NF4_TABLE) / len(NF4_TABLE)),
    "mxfp4": math.sqrt(sum(v**2 for v in MXFP4_TABLE) / len(MXFP4_TABLE)),
    "int8": math.sqrt((256**2 - 1) / 12),
    "raw": 1.0,
}
"""Root mean square of uniform random codes."""
_WRITES_HIDDEN = ("o_proj", "down_proj", "w2", "c_proj", "out_proj", "dense_4h_to_h", "wo", "fc2")
_MARK = "synth.partial"
Shapes = Callable[[Path], dict[str, tuple[int, ...]]]


def synthesize_store(
    config_path: Path, store: Path, shapes_of: Shapes, settings: QuantizeSettings | None = None, *,
    seed: int = 0, share_layers: bool = False, threads: int | None = None,
) -> Manifest:  # fmt: skip
    """Make `store` with random weights.

    Args:
        config_path: a config.json, or a folder that holds one (its tokenizer files are copied; without any, a
            tokenizer is made, see `store.tokens`).
        shapes_of: names and shapes of all tensors that a checkpoint of this config.json would hold.
        share_layers: layers of equal structure are one file under several names (hard links), with equal weights.
        threads: files written at once; None: as many as there are cores.

    Raises:
        UserError: unusable config.json, `store` exists or cannot be written, too little room on the disk.
    """
    settings = settings or QuantizeSettings()
    check_settings(settings)
    folder = config_path if config_path.is_dir() else config_path.parent
    file = config_path / "config.json" if config_path.is_dir() else config_path
    if store.exists() and not (store.is_dir() and not any(store.iterdir())):
        raise UserError("exists already", fix="give another STORE, or delete it first", path=store)
    config = read_json(file)
    facts = model_facts(config, file)
    tensors = {name: _info(name, shape, file, _stored_dtype(config)) for name, shape in shapes_of(file).items()}
    layout = layout_of(tensors, facts, file)
    groups = plan_groups(layout, facts.num_experts, settings)
    check_writable(store)
    first_of = _first_alike(groups, layout.prefix) if share_layers else {}
    distinct = [g for g in groups if g.key not in first_of]
    partial = _open_partial(store, sum(g.nbytes for g in distinct))
    tied = not any(p.tensor_class == "head" and len(p.tensor.shape) == 2 for p in groups[0].tensors)
    make = _Generator(partial, seed, _deviations(facts, tied))
    try:
        checksums = make.run(distinct, threads or len(os.sched_getaffinity(0)))
        for group in groups:
            if group.key in first_of:
                twin = first_of[group.key]
                os.link(partial / twin.file, partial / group.file)
                sums = [checksums[twin.key][p.tensor.name] for p in twin.tensors]
                checksums[group.key] = {p.tensor.name: s for p, s in zip(group.tensors, sums, strict=True)}
        files = _small_files(folder if config_path.is_dir() else None, config, tied, partial, facts)
        told = f"SYNTHETIC: random weights of seed {seed} from {file.name}, of no use but to measure"
        shared = (f"{len(first_of)} layers share files of like layers by hard links",) if first_of else ()
        digest = _fingerprint(config, settings, seed, share_layers)
        manifest = Manifest(
            format_version=FORMAT_VERSION, checksum="0" * 32, lamella_version=__version__,
            source=f"synthetic:{facts.model_type}:seed={seed}", source_fingerprint=digest,
            model_type=facts.model_type, num_layers=len(groups) - 1, layer_prefix=layout.prefix,
            tie_word_embeddings=tied, block_size=settings.block_size, double_quant=settings.double_quant,
            kept_dtype=settings.kept_dtype, notices=(told, *shared, *report_notices(groups)),
            report=report_rows(groups), synthetic=True, files=files,
            outer=group_record(groups[0], checksums["outer"], settings),
            layers=tuple(group_record(g, checksums[g.key], settings) for g in groups[1:]),
        )  # fmt: skip
        write_bytes(partial / MANIFEST_NAME, manifest_bytes(manifest))
        (partial / _MARK).unlink()
        fsync_path(partial / "layers")
        os.rename(partial, store)
        fsync_path(store.resolve().parent)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", fix="check the disk", path=partial) from error
    finally:  # renamed by now, or of no use
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


# ---- what is made ---------------------------------------------------------------------------------


def _stored_dtype(config: dict[str, Any]) -> str:
    named = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtypes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    if named not in dtypes:
        raise UserError(f"config.json says dtype {named!r}", fix=f"use one of {', '.join(dtypes)}")
    return dtypes[named]


def _info(name: str, shape: tuple[int, ...], file: Path, dtype: str) -> TensorInfo:
    return TensorInfo(name, file, dtype, shape, 0, math.prod(shape) * DTYPE_BYTES[dtype])


def _first_alike(groups: list[PlannedGroup], prefix: str) -> dict[str, PlannedGroup]:
    """Key of each layer that is like an earlier one -> the first of its kind."""
    seen: dict[Any, PlannedGroup] = {}
    found = {}
    for group in groups[1:]:
        start = f"{prefix}.{group.key}."
        look = (group.nbytes, *((p.tensor.name.removeprefix(start), p.tensor.shape, p.format, p.dtype,
                                 tuple(p.parts.items())) for p in group.tensors))  # fmt: skip
        if seen.setdefault(look, group) is not group:
            found[group.key] = seen[look]
    return found


def _deviations(facts: ModelFacts, tied: bool) -> Callable[[Planned], float]:
    """Standard deviation of a tensor's values; 0 for those that are constant (see `_constant`)."""

    def of(planned: Planned) -> float:
        kind, modules = planned.tensor_class, planned.tensor.name.split(".")
        if kind in ("norm", "bias"):
            return 0.0
        if kind == "router":
            return 1 / math.sqrt(facts.hidden_size or planned.tensor.shape[-1])
        if kind == "embedding":
            return STD if tied else 1.0
        return STD / math.sqrt(2 * facts.num_layers) if set(modules) & set(_WRITES_HIDDEN) else STD

    return of


def _open_partial(store: Path, nbytes: int) -> Path:
    partial = partial_path(store)
    if partial.exists():
        if not (partial / _MARK).is_file():
            raise UserError("is in the way, and not of `lamella store synth`", fix="delete or finish it", path=partial)
        shutil.rmtree(partial)
    try:
        (partial / "layers").mkdir(parents=True)
        (partial / _MARK).touch()
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", fix="choose another STORE", path=partial) from error
    free = free_bytes(partial)
    if free < nbytes + _SPARE_BYTES:
        shutil.rmtree(partial)
        raise UserError(f"disk has too little room: needs {format_bytes(nbytes + _SPARE_BYTES)}, {format_bytes(free)} free",
                        fix="make room, choose another STORE, or share equal layers' file with --share-layers",
                        path=store)  # fmt: skip
    return partial


def _small_files(
    source: Path | None, config: dict[str, Any], tied: bool, partial: Path, facts: ModelFacts
) -> dict[str, CopiedFile]:
    files = {} if source is None else copy_files(source, config, tied, partial)
    written = []
    if "config.json" not in files:
        written.append(write_json(partial / "config.json", corrected_config(config, tied) or config, indent=2))
    if "tokenizer.json" not in files and "tokenizer_config.json" not in files:
        written += write_tokenizer(partial, facts.vocab_size or 0)
    for file in written:
        files[file.name] = CopiedFile(nbytes=file.stat().st_size, checksum=file_checksum(file))
    return files


def _fingerprint(config: dict[str, Any], settings: QuantizeSettings, seed: int, shared: bool) -> str:
    told = repr(("synthetic", sorted(config.items(), key=lambda item: item[0]), asdict(settings), seed, shared))
    return xxhash.xxh3_128_hexdigest(told.encode())


# ---- bytes ----------------------------------------------------------------------------------------


class _Generator:
    """Writes groups: each is one job, made of chunks that follow from (seed, tensor, part, place)."""

    def __init__(self, folder: Path, seed: int, std_of: Callable[[Planned], float]) -> None:
        self.folder, self.seed, self.std_of = folder, seed, std_of
        self._lock = threading.Lock()

    def run(self, groups: list[PlannedGroup], threads: int) -> dict[str, dict[str, str]]:
        """Group key -> tensor name -> checksum."""
        largest_first = sorted(groups, key=lambda g: -g.nbytes)
        with progress("synth", sum(g.nbytes for g in groups), "B") as meter, ThreadPoolExecutor(threads) as pool:

            def advance(nbytes: int) -> None:
                with self._lock:
                    meter.advance(nbytes)

            jobs = {g.key: pool.submit(self._write, g, advance) for g in largest_first}
            try:
                wait(jobs.values(), return_when=FIRST_EXCEPTION)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
            return {key: job.result() for key, job in jobs.items()}

    def _write(self, group: PlannedGroup, advance: Callable[[int], None]) -> dict[str, str]:
        checksums = {}
        fd = os.open(self.folder / group.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for planned in group.tensors:
                digest = xxhash.xxh3_128()
                for part, (offset, nbytes) in planned.parts.items():
                    for chunk in self._chunks(planned, part, nbytes):
                        view = memoryview(chunk.data)
                        digest.update(view)
                        while view:
                            done = os.pwrite(fd, view, offset)
                            view, offset = view[done:], offset + done
                        advance(len(chunk))
                checksums[planned.tensor.name] = digest.hexdigest()
            os.ftruncate(fd, group.nbytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        return checksums

    def _chunks(self, planned: Planned, part: str, nbytes: int) -> Iterator[np.ndarray]:
        """The part's bytes, uint8, in pieces."""
        key = xxhash.xxh3_64_intdigest(f"{planned.tensor.name}/{part}".encode())
        rng = np.random.Generator(np.random.SFC64([self.seed, key]))
        std = self.std_of(planned)
        scale = std / _RMS[planned.format]
        if part == "absmax_code":
            yield dynamic_code().numpy().view(np.uint8)
        elif part == "offset":
            yield np.array([scale], np.float32).view(np.uint8)
        elif part == "absmax2":
            yield np.full(nbytes // 4, scale / 10, np.float32).view(np.uint8)
        else:
            for start in range(0, nbytes, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, nbytes - start)
                if part in ("codes", "absmax_q"):
                    yield rng.integers(0, 1 << 64, -(-size // 8), np.uint64).view(np.uint8)[:size]
                elif part == "scales" and planned.format == "mxfp4":
                    yield np.full(size, 127 + round(math.log2(scale)), np.uint8)
                elif part in ("absmax", "scales"):
                    yield (scale * rng.uniform(0.9, 1.1, size // 4).astype(np.float32)).view(np.uint8)
                else:
                    yield _plain(planned, rng, std, size)


def _plain(planned: Planned, rng: np.random.Generator, std: float, nbytes: int) -> np.ndarray:
    """A raw tensor's values as bytes of its dtype."""
    wide = planned.dtype == "float32"
    count = nbytes // (4 if wide else 2)
    if std:
        values = rng.standard_normal(count, np.float32) * np.float32(std)
    else:
        values = np.full(count, 0 if planned.tensor_class == "bias" else 1, np.float32)
    if wide:
        return values.view(np.uint8)
    if planned.dtype == "float16":
        return values.astype(np.float16).view(np.uint8)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)  # to nearest, ties to even
