"""`lamella export`: an adapter in another layout, or merged into a model; measured, and proven in other engines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamella.adapter.layouts import GGUF, LAYOUTS
from lamella.adapter.read import AdapterFile
from lamella.checkpoint.source import read_json
from lamella.console import notice
from lamella.errors import RunFailed, UserError
from lamella.export import travel
from lamella.export.adapter_base import base_of, open_base
from lamella.export.adapters import aside, check_base, export_adapter
from lamella.export.answers import Answered, chats_of, verify_answers
from lamella.export.engines.server import TransformersServe
from lamella.export.merge import EXPORT_FILE, FORMS, GGUF_FORMS, merge, write_base
from lamella.export.verify import EXACT, Target, Verified, verify
from lamella.export.writers.gguf_lora import export_lora
from lamella.files import write_json

MODELS = ("merged", *(form for form in FORMS if form != "auto"))
ADAPTERS = (*LAYOUTS, GGUF)
ADAPTER_FILE = "adapter.gguf"
_AGAIN = "export again with this version"
_EXACT_FORMS = ("fp32", "gguf-f32")


@dataclass(frozen=True)
class Ask:
    """What is to be exported.

    Attributes:
        source: run or adapter folder; out: new folder.
        to: one of `ADAPTERS` or `MODELS`.
        store: it was trained on; None: the one that the run's receipt names.
        onto: "store", or the checkpoint to merge into instead.
        dtype, max_loss: see `merge`. another_base, allowed: see `export_adapter`.
    """

    source: Path
    out: Path
    to: str
    store: Path | None = None
    onto: str = "store"
    dtype: str | None = None
    max_loss: float | None = None
    another_base: bool = False
    allowed: tuple[str, ...] = ()

    @property
    def is_adapter(self) -> bool:
        return self.to in ADAPTERS

    def check(self) -> None:
        """Raises `UserError`: an unknown target, a loss that is none, or what says nothing about this target."""
        if self.to not in (*ADAPTERS, *MODELS):
            raise UserError(
                f"--to {self.to!r} is no target", fix=f"adapters: {', '.join(ADAPTERS)}; models: {', '.join(MODELS)}"
            )
        if self.max_loss is not None and not self.max_loss >= 0:
            raise UserError(f"--max-loss {self.max_loss:g} is no share", fix="give a number from 0, such as 0.1")
        idle = [name for name, given in (("--onto", self.onto != "store"), ("--dtype", self.dtype is not None),
                                         ("--max-loss", self.max_loss is not None)) if given]  # fmt: skip
        if self.is_adapter and idle:
            raise UserError(f"{', '.join(idle)}: about merged models, --to {self.to} writes an adapter",
                            fix=f"leave it out, or --to {MODELS[0]}")  # fmt: skip
        if self.allowed and (not self.is_adapter or self.to == GGUF):
            raise UserError(f"--allow is not looked at with --to {self.to}", fix="leave it out")


@dataclass
class Export:
    """What came out; kept as `export.json` in the export's folder.

    Attributes:
        to: the target in effect; kind: "adapter" or "merged".
        facts: what the writer told; verified: what engines said since.
    """

    folder: Path
    to: str
    kind: str
    store: Path
    source: Path
    facts: dict[str, Any]
    verified: list[Verified | Answered] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        before = self.facts.get("verified", [])
        return {
            **self.facts, "to": self.to, "kind": self.kind, "store": str(self.store), "source": str(self.source),
            "verified": [*before, *(found.to_dict() for found in self.verified)],
        }  # fmt: skip

    def save(self) -> None:
        write_json(self.folder / EXPORT_FILE, self.to_dict(), indent=2)

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.to)

    @classmethod
    def read(cls, folder: Path) -> Export:
        """An export made before.

        Raises:
            UserError: no export, or a broken `export.json`.
        """
        file = folder / EXPORT_FILE
        if not file.is_file():
            raise UserError("is no export", fix="give a folder that `lamella export` made", path=folder)
        tree = read_json(file, fix=_AGAIN)
        to, kind, store, source = (tree.get(key) for key in ("to", "kind", "store", "source"))
        for key, value in (("store", store), ("source", source)):
            if not isinstance(value, str):
                raise UserError(f"{key} is {value!r}", fix=_AGAIN, path=file)
        if kind != ("adapter" if to in ADAPTERS else "merged") or to not in (*ADAPTERS, *MODELS):
            raise UserError(f"to is {to!r}, kind {kind!r}", fix=_AGAIN, path=file)
        if not isinstance(tree.get("verified", []), list):
            raise UserError(f"verified is {tree['verified']!r}", fix=_AGAIN, path=file)
        return cls(folder, str(to), str(kind), Path(str(store)), Path(str(source)), tree)


def export(ask: Ask, texts: Sequence[Sequence[int]] | None = None) -> Export:
    """Write what is asked; nothing stands at `ask.out` until it is whole.

    Args:
        texts: token ids on which a merged model is compared with the adapter on its base.

    Raises:
        UserError: an unknown target, and what `export_adapter`, `merge` and the GGUF writers refuse.
    """
    ask.check()
    store = store_of(ask)
    if ask.to == GGUF:
        return _gguf_adapter(ask, store)
    if ask.is_adapter:
        done = export_adapter(ask.source, ask.out, ask.to, store, another_base=ask.another_base, allowed=ask.allowed)
        facts: dict[str, Any] = {"pairs": done.pairs, "tensors": done.tensors, "notices": list(done.notes)}
        for line in done.notes:
            notice(line)
        found = Export(ask.out, ask.to, "adapter", store, ask.source, facts)
    else:
        form = "auto" if ask.to == "merged" else ask.to
        merged = merge(
            store, ask.source, ask.out, form, onto=ask.onto, dtype=ask.dtype, max_loss=ask.max_loss,
            another_base=ask.another_base, texts=texts,
        )  # fmt: skip
        found = Export(ask.out, merged.form, "merged", store, ask.source, read_json(ask.out / EXPORT_FILE))
    found.save()
    return found


def store_of(ask: Ask) -> Path:
    """The store asked for, or the one that the run's receipt names."""
    return ask.store if ask.store is not None else base_of(ask.source)


def _gguf_adapter(ask: Ask, store: Path) -> Export:
    """The adapter's file and what belongs to it, written aside first."""
    if ask.out.exists():
        raise UserError("exists already", fix="give another folder, or remove it", path=ask.out)
    base = open_base(store)
    file = AdapterFile(ask.source, base.skeleton)
    check_base(file, base, ask.another_base)
    with aside(ask.out) as temp:
        done = export_lora(ask.source, base.skeleton, temp / ADAPTER_FILE, {"base_fingerprint": base.fingerprint})
        notes = [f"start: llama-server -m BASE.gguf --lora {shlex.quote(str(ask.out / ADAPTER_FILE))}"]
        if done.folded:
            notes.append(f"{done.folded} pairs of another scale were folded into their B: one alpha holds for all")
        notes += travel.write(temp, base, source=ask.source, facts=file.facts, kind="adapter", layout=GGUF, notes=notes)
        found = Export(
            temp, GGUF, "adapter", store, ask.source, {"pairs": len(file.sites), "tensors": done.tensors, "notices": notes}
        )  # fmt: skip
        found.save()
        temp.rename(ask.out)
    found.folder = ask.out
    for line in notes:
        notice(line)
    return found


def prove(
    found: Export, target: Target, python: Path | None, prompts: Sequence[tuple[int, ...]], scratch: Path,
    *, base: Path | None = None, dtype: str = "float32", limit: float | None = None, threads: int = 2,
) -> Verified:  # fmt: skip
    """Load the export in another engine and compare log p on real prompts.

    Args:
        base: what the engine is to load under an adapter; None: the dequantised base, written into `scratch` first.
        limit: of the largest difference of log p; None: `EXACT` for what is exact (adapters on the dequantised base, merges in
            fp32) when the engine computes in fp32, none otherwise.

    Raises:
        UserError: the engine is not installed, or takes another kind of file.
        RunFailed: it refuses the export, or what it says is not what the adapter says.
    """
    check_engine(target, python, found.to)
    if found.kind == "merged":
        model, served = (_only_gguf(found.folder) if found.is_gguf else found.folder), None
        exact = found.to in _EXACT_FORMS
    else:
        model = base if base is not None else dequantised(found.store, scratch / "base", found.is_gguf)
        served, exact = (found.folder / ADAPTER_FILE if found.is_gguf else found.folder), base is None
    if limit is None and exact and dtype == "float32":
        limit = EXACT
    done = verify(target, model, served, store=found.store, adapter=found.source, prompts=prompts, limit=limit, python=python,
                  dtype=dtype, threads=threads)  # fmt: skip
    _keep(found, done)
    return done


def prove_answers(
    found: Export, server: TransformersServe, python: Path | None, files: Sequence[Path], *, dtype: str = "float32",
    threads: int = 2,
) -> Answered:  # fmt: skip
    """As `prove`, of a server that tells no log-probabilities: its answers to the data's chats.

    Raises:
        UserError: as `prove`; or there are no chats. RunFailed: as `prove`.
    """
    check_engine(server, python, found.to)
    done = verify_answers(server, found.folder, store=found.store, adapter=found.source, chats=chats_of(found.source, files),
                          python=python, dtype=dtype, threads=threads)  # fmt: skip
    _keep(found, done)
    return done


def _keep(found: Export, done: Verified | Answered) -> None:
    found.verified.append(done)
    found.save()
    if not done.ok:
        raise RunFailed(
            f"{done.engine}: {'; '.join(done.failures)}", fix="do not serve it; see export.json", path=found.folder
        )


def is_gguf(to: str) -> bool:
    return to == GGUF or to in GGUF_FORMS


def check_engine(target: Target | TransformersServe, python: Path | None, to: str) -> None:
    """What can be known before there is an export.

    Raises:
        UserError: the engine is not installed, or takes another kind of file than `to`.
    """
    if isinstance(target, TransformersServe) and (to in ADAPTERS or is_gguf(to)):
        raise UserError(f"{target.name} serves models, the export is {to!r}", fix="--to merged")
    takes_gguf = bool(getattr(target, "takes_gguf", False))
    if takes_gguf != is_gguf(to):
        what = "takes GGUF files" if takes_gguf else "does not take GGUF files"
        raise UserError(
            f"{target.name} {what}, the export is {to!r}",
            fix="--to gguf-f16 or gguf, or another --engine"
            if takes_gguf
            else "--to merged or peft, or --engine llama.cpp",
        )
    target.interpreter(python)


def dequantised(store: Path, folder: Path, as_gguf: bool) -> Path:
    """The base that the adapter was trained on, in fp32, as an engine loads it; made once."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        notice("writing the dequantised base in fp32")
        write_base(store, folder, "gguf-f32" if as_gguf else "fp32")
    return _only_gguf(folder) if as_gguf else folder


def _only_gguf(folder: Path) -> Path:
    return next(file for file in sorted(folder.glob("*.gguf")) if file.name != ADAPTER_FILE)


def lines(found: Export) -> list[str]:
    """What engines said, for people."""
    return [
        f"{v.engine}: {v.same:.0%} of its answers to {v.chats} chats are Lamella's, {v.base:.0%} the base's"
        if isinstance(v, Answered)
        else f"{v.engine}: log p within {v.tuned.largest:.2g} nats, KL {v.tuned.kl:.2g}, same likeliest token "
        f"{100 * v.tuned.top1:.1f} % at {v.positions} positions of {v.prompts} prompts; differs from the base by up to "
        f"{v.from_base.largest:.3g} nats"
        for v in found.verified
    ]


def to_json(found: Export) -> str:
    return json.dumps({"out": str(found.folder), **found.to_dict()})
