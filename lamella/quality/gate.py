"""`lamella quantize --check`: what a store has cost, by class of weights, and what to do about it.

Base and store go through the layers side by side, and with them the base with one class of weights at a time taken from the
store. Where the store is not fine, every other choice of classes is measured too, so that what is advised has been seen.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lamella.checkpoint.source import Checkpoint, locate
from lamella.console import progress
from lamella.engine.passes import HOLD_BYTES
from lamella.engine.values import StoreValues
from lamella.files import write_json
from lamella.models.skeleton import load_config
from lamella.quality.divergence import (
    Base,
    Divergence,
    Model,
    Stored,
    divergences,
    resolve_dtype,
    same_source,
    stored_names,
)
from lamella.quality.texts import Texts, read_texts
from lamella.quality.verdict import FINE, POOR, Classes, Verdict, formats_fragment, judge, subsets
from lamella.quality.weights import WeightError, by_class, outliers, weight_errors
from lamella.store.quantize import QuantizeSettings, plan_store

QUALITY_NAME = "quality.json"
FEW_TOKENS = 2000
"""Below this the figures are rough, and the report says so."""
_SHOWN = 5
_NAMED = 8
"""Most single tensors that advice names."""


@dataclass(frozen=True)
class Quality:
    """Attributes:
    dtype: that layers were computed in.
    whole: the store's divergence from its checkpoint; parts: classes from the store -> divergence, the rest as it was.
    formats: quantised class -> format of most of its weights; parameters: its weights.
    errors: of every quantised tensor.
    fragment: quantize.toml to go on with, or "".
    seconds: all of it took.
    """

    checkpoint: str
    store: Path
    texts: Texts
    dtype: str
    whole: Divergence
    parts: dict[Classes, Divergence]
    formats: dict[str, str]
    parameters: dict[str, int]
    errors: list[WeightError]
    verdict: Verdict
    fragment: str
    seconds: float

    def worst(self) -> list[WeightError]:
        return sorted(self.errors, key=lambda e: (-e.relative, e.name))[:_SHOWN]

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint, "store": str(self.store), "dtype": self.dtype,
            "text": {"file": str(self.texts.source), "rows": self.texts.rows, "texts": self.whole.texts,
                     "positions": self.whole.tokens, "cut": self.texts.cut, "unusable": self.texts.unusable},
            "whole": _figures(self.whole),
            "parts": [{"from_store": sorted(classes), **_figures(found)} for classes, found in self.parts.items()],
            "classes": {name: {"format": self.formats[name], "parameters": self.parameters[name],
                               "weight_error": error} for name, error in by_class(self.errors).items()},
            "worst_tensors": [asdict(e) for e in self.worst()],
            "verdict": {"level": self.verdict.level, "text": self.verdict.text, "keep": list(self.verdict.keep),
                        "reasons": list(self.verdict.reasons)},
            "limits": {"fine": asdict(FINE), "poor": asdict(POOR)},
            "quantize_toml": self.fragment, "seconds": round(self.seconds, 3),
        }  # fmt: skip


def _figures(found: Divergence) -> dict[str, Any]:
    return {**asdict(found), "perplexity_ratio": found.perplexity_ratio}


def texts_for(source: str | Path, file: Path, tokens: int) -> Texts:
    """The texts of a check, by the tokenizer of a checkpoint folder or a store: see `read_texts`."""
    folder = locate(source)
    context = getattr(load_config(folder), "max_position_embeddings", None)
    return read_texts(file, folder, tokens, context)


def differs(checkpoint: str | Path, store: Path, settings: QuantizeSettings, given: Collection[str]) -> list[str]:
    """How a finished store differs from these of the settings.

    Raises:
        UserError: with `formats` among them: rules that do not fit the checkpoint.
    """
    manifest = StoreValues.open(store).store.manifest
    plain = [key for key in given if key != "formats"]
    pairs = [(key, getattr(manifest, key), getattr(settings, key)) for key in plain]
    found = [f"{key} {there}, not {asked}" for key, there, asked in pairs if there != asked]
    if "formats" in given:
        with Checkpoint.open(checkpoint) as opened:
            planned = {p.tensor.name: p.format for group in plan_store(opened, settings).groups for p in group.tensors}
        records = [record for _, group in manifest.groups() for record in group.tensors]
        other = [r for r in records if planned.get(r.name, r.format) != r.format]
        if other:
            found.append(f"{len(other)} tensors in other formats, first {other[0].name} in {other[0].format}")
    return found


def check_store(
    checkpoint: str | Path, store: Path, texts: Texts, dtype: str = "auto", hold_bytes: int = HOLD_BYTES
) -> Quality:
    """Compare a store with the checkpoint it was made from, and write `quality.json` into its folder.

    Raises:
        UserError: the store was made from another checkpoint, a model that cannot be run, a broken layer.
    """
    start_s = time.monotonic()
    stored = StoreValues.open(store)
    plain = same_source(stored, checkpoint)
    try:
        parameters, formats = _classes(stored)
        in_effect = str(resolve_dtype(dtype, stored)).removeprefix("torch.")
        total = sum(parameters.values())
        with progress("check weights", total, "weights") as meter:
            errors = weight_errors(plain, stored, meter.advance)
    finally:
        plain.close()

    def measure(label: str, choices: list[Classes], models: dict[str, Model]) -> dict[str, Divergence]:
        some = {_key(c): Stored(store, only=stored_names(stored, c), base=checkpoint) for c in choices}
        with progress(label, texts.tokens, "tokens") as meter:
            return divergences(
                Base(checkpoint),
                {**models, **some},
                texts.ids,
                dtype=dtype,
                hold_bytes=hold_bytes,
                advance=meter.advance,
            )

    possible = subsets(parameters)
    measured = measure("check logits", [c for c in possible if len(c) == 1], {"store": Stored(store)})
    whole = measured.pop("store")
    more = [c for c in possible if _key(c) not in measured]
    if FINE.beyond(whole) and more:
        measured |= measure("check what to keep", more, {})
    parts = {c: measured[_key(c)] for c in possible if _key(c) in measured}
    verdict = judge(whole, parts, parameters)
    named = [e.name for e in outliers(errors) if e.tensor_class not in verdict.keep][:_NAMED]
    quality = Quality(
        checkpoint=str(checkpoint), store=store, texts=texts, dtype=in_effect, whole=whole, parts=parts, formats=formats,
        parameters=parameters, errors=errors, verdict=verdict, fragment=formats_fragment(verdict, formats, named),
        seconds=time.monotonic() - start_s,
    )  # fmt: skip
    write_json(store / QUALITY_NAME, quality.to_json())
    return quality


def _key(classes: Classes) -> str:
    return " + ".join(sorted(classes))


def _classes(stored: StoreValues) -> tuple[dict[str, int], dict[str, str]]:
    """Quantised class -> its weights, and the format of most of them."""
    weights: dict[str, Counter[str]] = {}
    for _, group in stored.store.manifest.groups():
        for record in group.tensors:
            if record.format != "raw":
                weights.setdefault(record.tensor_class, Counter())[record.format] += record.numel
    return (
        {name: count.total() for name, count in weights.items()},
        {name: count.most_common(1)[0][0] for name, count in weights.items()},
    )
