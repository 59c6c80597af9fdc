"""A store and an adapter as one model of the usual kind, streamed tensor by tensor: memory holds pieces, at any size.

By default the base is the dequantised store, which is what the adapter was trained on; the checkpoint that the store was made from
is another model by far more than the adapter changes (`onto`). What rounding to the target's form leaves of the adapter is
measured on every value that is written (`export.loss`), told, and judged.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lamella import __version__
from lamella.console import notice, progress
from lamella.errors import UserError
from lamella.export import travel
from lamella.export.delta import PairFile
from lamella.export.job import MergeJob, said_dtype
from lamella.export.loss import Loss, TensorLoss, by_class, complaint, lines, refuse, worst
from lamella.export.writers import PIECE_VALUES, ModelWriter, Target, gguf
from lamella.export.writers.fp8 import Fp8Writer
from lamella.export.writers.nf4 import Nf4Writer
from lamella.export.writers.plain import DTYPES, PlainWriter
from lamella.export.writers.shards import SHARD_BYTES
from lamella.files import file_checksum, free_bytes, fsync_path, write_json
from lamella.quality.divergence import Base as Checkpointed
from lamella.quality.divergence import Divergence, Model, Stored, divergences
from lamella.store.journal import check_writable, partial_path
from lamella.store.reader import Store
from lamella.units import format_bytes, format_seconds

GGUF_FORMS = tuple(f"gguf-{form}" for form in gguf.FORMS)
FORMS = ("auto", "bf16", "fp16", "fp32", "fp8", "nf4", *GGUF_FORMS)
EXPORT_FILE = "export.json"


@dataclass(frozen=True)
class Order:
    """What a writer is made for.

    Attributes:
        folder: to write into; it gets OUT's name when all is done.
        targets: every tensor of the model, in the order in which they come.
        head: full name of the model's output layer.
        config: config.json of the plain model; files: name -> what goes with the weights.
    """

    folder: Path
    targets: Sequence[Target]
    head: str
    config: Mapping[str, Any]
    files: Mapping[str, Path]


WriterOf = Callable[[Order], ModelWriter]
_MARK = ".lamella-merge"
_SPARE_BYTES = 64 << 20
_SURVEYED = 12
"""Tensors a class that are looked at to choose a dtype, or to refuse one before anything is written."""
_MARGIN = 1.25


@dataclass(frozen=True)
class Merged:
    """What was written.

    Attributes:
        path, form: the folder, and "bf16", "fp16", "fp32", "fp8", "nf4" or what the given writer makes.
        nbytes: of all files; tensors: how many the model has; adapted: to how many of them something was added.
        adapter_tensors: tensors of the adapter's file, all of them used.
        losses: by stored tensor, of those that were adapted.
        unchanged: adapted tensors of a delta that is not zero whose file holds the base's very values.
        base_difference: onto a checkpoint: ||checkpoint - store|| / ||delta|| over the adapted tensors; else None.
        seconds: of the whole merge.
        notices: what the user was told.
        divergence: of the merged model, as read back, from adapter-on-base on the given texts; base_divergence: of the base
            without its adapter, beside which the first is to be seen.
    """

    path: Path
    form: str
    nbytes: int
    tensors: int
    adapted: int
    adapter_tensors: int
    losses: tuple[TensorLoss, ...]
    unchanged: tuple[str, ...]
    base_difference: float | None
    seconds: float
    notices: tuple[str, ...]
    divergence: Divergence | None = None
    base_divergence: Divergence | None = None

    def facts(self) -> dict[str, Any]:
        """For `export.json`."""
        return {
            "form": self.form, "bytes": self.nbytes, "tensors": self.tensors, "adapted": self.adapted,
            "adapter_tensors_used": self.adapter_tensors, "unchanged": list(self.unchanged),
            "loss": {name: _told(loss) for name, loss in by_class(self.losses).items()},
            "worst": [{"name": one.name, **_told(one.loss)} for one in worst(self.losses)],
            "base_difference": self.base_difference, "seconds": round(self.seconds, 2), "notices": list(self.notices),
            "divergence": None if self.divergence is None else asdict(self.divergence),
            "base_divergence": None if self.base_divergence is None else asdict(self.base_divergence),
        }  # fmt: skip


def _told(loss: Loss) -> dict[str, float]:
    return {"error": loss.error, "kept": loss.kept, "mean_delta": loss.mean_delta, "values": loss.values}


def merge(
    store: Path,
    adapter: Path,
    out: Path,
    form: str = "auto",
    *,
    onto: str | Path = "store",
    layout: str | None = None,
    dtype: str | None = None,
    max_loss: float | None = None,
    another_base: bool = False,
    experts_4bit: bool = False,
    texts: Sequence[Sequence[int]] | None = None,
    writer: WriterOf | None = None,
    shard_bytes: int = SHARD_BYTES,
    finished: Callable[[Path], None] | None = None,
) -> Merged:
    """Write the merged model to `out`; nothing stands under that name until it is whole.

    Args:
        store: layer store; adapter: folder of an adapter trained on it.
        form: "bf16", "fp16", "fp32"; "fp8" (blocks of 128 x 128), "nf4" (bitsandbytes), both with the rest in `dtype`;
            "gguf-..." (`writers.gguf.FORMS`): one file in `out`; "auto": the narrowest of the first three that keeps the delta.
        onto: "store", or the checkpoint (folder or hub id) in whose place the store stands.
        layout: of the adapter, where its files do not tell (`adapter.layouts`).
        dtype: of what "fp8" and "nf4" leave in 16 or 32 bit; None: bf16, or fp16 where the checkpoint was that.
        max_loss: limit on each class's error of the recovered delta; None: `loss.MAX_ERROR`, and for 4 and 8 bit
            `loss.MIN_KEPT` of what is kept.
        another_base: merge although the store's, or `onto`'s, weights are not those that the adapter was trained on.
        experts_4bit: "nf4": single experts' weights too (vLLM reads them, transformers 5 does not).
        texts: token ids; the merged model is read back and compared with adapter-on-base on them (`quality.divergence`).
        writer: makes the writer of a form of its own, which `form` names.
        shard_bytes: see `Shards`.
        finished: told of each weight file that is whole and on disk, and free to take it away; then room is needed for two.

    Raises:
        UserError: `out` exists, no room, an adapter of another base or model, one of which a tensor would not be used, values
            that the form cannot hold, a loss above the limit.
    """
    begin_s = time.monotonic()
    if form not in FORMS and writer is None:
        raise UserError(f"form {form!r} is not known", fix=f"give one of {', '.join(FORMS)}")
    if texts is not None and finished is not None:
        raise UserError("texts are given, and files that may be taken away", fix="compare without `finished`")
    if out.exists():
        raise UserError("exists already", fix="give another OUT, or delete it first", path=out)
    opened = Store.open(store)
    job = MergeJob(opened, adapter, onto, layout, another_base)
    assert job.pairs is not None
    check_writable(out, "the export", "-o DIR")
    with torch.inference_mode():
        if writer is None:
            form = _settled_form(job, form, max_loss)
        with _partial_folder(out) as partial:
            order = Order(partial, job.targets, job.head, job.config, _small_files(opened, adapter))
            made = writer(order) if writer else _writer(order, form, dtype, experts_4bit, shard_bytes, finished)
            _check_room(partial, made.nbytes if finished is None else min(made.nbytes, 2 * shard_bytes))
            losses, unchanged = _stream(job, made, form, max_loss)
            refuse(losses, form, max_loss)
            _all_used(job.pairs)
            made.finish(order.config, order.files)
            if form in GGUF_FORMS:  # for whoever wants the model's settings under transformers' names
                write_json(partial / "config.json", order.config, indent=2)
            said = travel.write(partial, job.of, source=adapter, facts=job.pairs.file.facts, kind="merged", layout=form)
            difference = _base_difference(job) if onto != "store" else None
            apart = _divergences(job, partial, form, texts) if texts is not None else (None, None)
            notices = (*_notices(made, losses, form, unchanged, difference), *_apart_notices(apart), *said)
            merged = Merged(
                out, form, made.nbytes, len(job.targets), len(job.deltas), job.pairs.tensors, tuple(losses), unchanged,
                difference, time.monotonic() - begin_s, notices, *apart,
            )  # fmt: skip
            write_json(partial / EXPORT_FILE, _export_facts(job, merged, onto), indent=2)
            fsync_path(partial)
            (partial / _MARK).unlink()
            partial.rename(out)
            fsync_path(out.absolute().parent)
    for line in (*lines(losses, form), *merged.notices):
        notice(line)
    notice(f"{out}: {format_bytes(merged.nbytes)} in {format_seconds(merged.seconds)}")
    return merged


def write_base(store: Path, out: Path, form: str = "fp32") -> None:
    """The dequantised base alone, in a plain or a GGUF form: what an adapter was trained on, for engines to load under it.

    Raises:
        UserError: as `merge`.
    """
    if out.exists():
        raise UserError("exists already", fix="give another OUT, or delete it first", path=out)
    opened = Store.open(store)
    job = MergeJob(opened, None, "store", None)
    check_writable(out, "the base", "OUT")
    with torch.inference_mode(), _partial_folder(out) as partial:
        order = Order(partial, job.targets, job.head, job.config, _small_files(opened, None))
        made = _writer(order, form, None, False, SHARD_BYTES, None)
        _check_room(partial, made.nbytes)
        _stream(job, made, form, None)
        made.finish(order.config, order.files)
        (partial / _MARK).unlink()
        partial.rename(out)


# ---- before -------------------------------------------------------------------------------------


def _writer(
    order: Order,
    form: str,
    dtype: str | None,
    experts_4bit: bool,
    shard_bytes: int,
    finished: Callable[[Path], None] | None,
) -> ModelWriter:
    partial, targets = order.folder, order.targets
    if form in GGUF_FORMS:
        kind = form.removeprefix("gguf-")
        return gguf.GgufWriter(partial / f"model-{kind}.gguf", targets, kind, order.config, order.files)
    if form in DTYPES:
        if dtype is not None and dtype != form:
            raise UserError(f"dtype {dtype!r} with form {form!r}", fix="leave dtype out; the form says it")
        return PlainWriter(partial, targets, form, head=order.head, shard_bytes=shard_bytes, finished=finished)
    if dtype is None:
        dtype = "fp16" if said_dtype(order.config) == "float16" else "bf16"
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known", fix=f"give one of {', '.join(DTYPES)}")
    if form == "nf4":
        return Nf4Writer(partial, targets, dtype, head=order.head, shard_bytes=shard_bytes, finished=finished,
                         experts=experts_4bit)  # fmt: skip
    return Fp8Writer(partial, targets, dtype, head=order.head, shard_bytes=shard_bytes, finished=finished)


def _settled_form(job: MergeJob, form: str, max_loss: float | None) -> str:
    """The narrowest dtype that keeps the delta for "auto"; any other is only looked at, so that a refusal comes early."""
    if form == "auto":
        for name in ("bf16", "fp16"):
            what = complaint(_survey(job, name), name, max_loss, 1 / _MARGIN)
            if not what:
                return name
            notice(f"{what} (surveyed)")
        return "fp32"
    if form in DTYPES:
        refuse(_survey(job, form), form, max_loss, _MARGIN)
    return form


def _survey(job: MergeJob, form: str) -> list[TensorLoss]:
    """The loss in a plain dtype of the first piece of some tensors of each class, evenly over the model."""
    named: dict[str, list[str]] = {}
    for name, delta in job.deltas.items():
        named.setdefault(delta.site.weight_class, []).append(name)
    found = []
    for names in named.values():
        for name in names[:: max(1, len(names) // _SURVEYED)]:
            source = job.source(name)
            values = torch.empty(min(job.records[name].numel, PIECE_VALUES))
            source.values(0, values)
            rounded = values.to(DTYPES[form][0]).float()
            if not bool(torch.isfinite(rounded).all()) and form == "fp16":
                rounded = torch.zeros_like(values)  # all of it is lost
            source.stored(0, rounded)
            found.append(job.loss_of(name, source.loss))
    return found


def _check_room(partial: Path, nbytes: int) -> None:
    free = free_bytes(partial)
    if free < nbytes + _SPARE_BYTES:
        raise UserError(f"disk has too little room: needs {format_bytes(nbytes + _SPARE_BYTES)}, {format_bytes(free)} free",
                        fix="make room, give another OUT, or a narrower form", path=partial.parent)  # fmt: skip


@contextmanager
def _partial_folder(out: Path) -> Any:
    """OUT.partial, gone at the end unless it was renamed."""
    partial = partial_path(out)
    if partial.exists():
        if not (partial / _MARK).is_file():
            raise UserError("is in the way, and not of a merge", fix="delete it", path=partial)
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        (partial / _MARK).touch()
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", fix="give another OUT", path=partial) from error
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# ---- the walk -----------------------------------------------------------------------------------


def _stream(
    job: MergeJob, made: ModelWriter, form: str, max_loss: float | None
) -> tuple[list[TensorLoss], tuple[str, ...]]:
    losses: list[TensorLoss] = []
    layer_of = {r.name: key for key, group in job.store.manifest.groups() for r in group.tensors}
    early = max(2, job.store.manifest.num_layers // 8)
    with progress("merge", sum(t.numel for t in job.targets), "weights") as meter:
        for number, target in enumerate(job.targets):
            source = job.source(target.name)
            made.tensor(target, source)
            if target.name in job.deltas:
                assert source.loss.values == target.numel, (
                    f"{target.name}: the writer told of {source.loss.values} values"
                )
                losses.append(job.loss_of(target.name, source.loss))
            meter.advance(target.numel)
            last = number + 1 == len(job.targets) or layer_of[job.targets[number + 1].name] != layer_of[target.name]
            key = layer_of[target.name]
            if last and isinstance(key, int) and key + 1 == early:
                refuse(losses, form, max_loss, _MARGIN)
    unchanged = tuple(one.name for one in losses if one.loss.delta2 and not one.loss.changed)
    return losses, unchanged


def _all_used(pairs: PairFile) -> None:
    left = [key for key in pairs.sites if key not in pairs.used]
    if left:
        raise UserError(f"{len(pairs.used)} of {len(pairs.sites)} pairs of the adapter were used, not {left[:3]}",
                        path=pairs.file.path, fix="the adapter belongs to another model")  # fmt: skip


def _base_difference(job: MergeJob) -> float:
    """||checkpoint - store|| / ||delta|| over the adapted tensors."""
    apart2 = delta2 = 0.0
    assert job.pairs is not None
    for name, delta in job.deltas.items():
        for first in range(0, job.records[name].numel, PIECE_VALUES):
            mine, theirs, added = (torch.empty(min(PIECE_VALUES, job.records[name].numel - first)) for _ in range(3))
            job.of_store.values(name, first, mine)
            job.base.values(name, first, theirs)
            delta.values(job.pairs, first, added)
            mine -= theirs
            apart2 += float(torch.dot(mine, mine))
            delta2 += float(torch.dot(added, added))
    return float((apart2 / delta2) ** 0.5) if delta2 else 0.0


# ---- after --------------------------------------------------------------------------------------


def _small_files(store: Store, adapter: Path | None) -> dict[str, Path]:
    """The store's tokenizer and other files; chat template and generation config are the adapter's where it has them."""
    files = {name: store.path / name for name in store.manifest.files if name != "config.json"}
    for name in ("chat_template.jinja", "generation_config.json"):
        if adapter is not None and (adapter / name).is_file():
            files[name] = adapter / name
    return files


def _notices(
    made: ModelWriter, losses: Sequence[TensorLoss], form: str, unchanged: Sequence[str], difference: float | None
) -> tuple[str, ...]:
    told = list(made.notices)
    if unchanged:
        told.append(
            f"{len(unchanged)} adapted tensors hold the base's very values: rounding ate their delta, first {unchanged[0]}"
        )
    if form not in DTYPES:
        told.append(f"{form} rounds the merged weights again; the figures above say what that leaves of the adapter")
    if difference is not None:
        told.append(f"merged onto the checkpoint, not onto the 4-bit base of the training: the two differ by {difference:.3g} times "
                    "the adapter's change")  # fmt: skip
    if not any(one.loss.delta2 for one in losses):
        told.append("the adapter is zero: the merged model is its base")
    return tuple(told)


def _divergences(
    job: MergeJob, partial: Path, form: str, texts: Sequence[Sequence[int]]
) -> tuple[Divergence | None, Divergence | None]:
    """Of the merged model, read back, and of the bare base, from adapter-on-base."""
    path = next(partial.glob("*.gguf")) if form in GGUF_FORMS else partial
    others: dict[str, Model] = {"merged": Checkpointed(path), "base": Stored(job.store.path)}
    found = divergences(Stored(job.store.path, job.adapter), others, texts)
    return found["merged"], found["base"]


def _apart_notices(apart: tuple[Divergence | None, Divergence | None]) -> list[str]:
    merged, base = apart
    if merged is None or base is None:
        return []
    return [
        f"KL from adapter-on-base over {merged.tokens} tokens: merged {merged.kl_mean:.3g} nats a token (99th percentile "
        f"{merged.kl_p99:.3g}), base alone {base.kl_mean:.3g}; the same first token in {merged.top1_agreement:.2%}, base alone "
        f"{base.top1_agreement:.2%}"
    ]


def _export_facts(job: MergeJob, merged: Merged, onto: str | Path) -> dict[str, Any]:
    manifest, pairs = job.store.manifest, job.pairs
    assert pairs is not None
    return {
        "lamella_version": __version__, "kind": "merged", **merged.facts(),
        "onto": "store" if onto == "store" else str(onto),
        "base": {"source": manifest.source, "fingerprint": manifest.source_fingerprint, "synthetic": manifest.synthetic},
        "adapter": {"file": pairs.file.path.name, "checksum": file_checksum(pairs.file.path),
                    "layout": pairs.file.layout.name},
        "sites": len(pairs.sites), "tie_word_embeddings": manifest.tie_word_embeddings,
    }  # fmt: skip
