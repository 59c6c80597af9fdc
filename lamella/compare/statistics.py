"""Differences between candidates: paired bootstrap over documents, p values, Holm's correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamella.eval.metrics import Floats, Interval, Prediction, interval, paired_draws

LEVEL = 0.05


@dataclass(frozen=True)
class Tested:
    """A difference with its interval and p value; p_holm: corrected over tenants, None for the average."""

    value: Interval
    p: float
    p_holm: float | None = None

    def to_json(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"value": self.value.value, "low": self.value.low, "high": self.value.high, "p": self.p}
        if self.p_holm is not None:
            tree |= {"p_holm": self.p_holm, "significant": self.p_holm < LEVEL}
        return tree


def p_value(draws_B: Floats, documents: int) -> float:
    """Two-sided bootstrap p value of "no difference": twice the smaller share of draws on one side of zero, each count with
    one added (Davison and Hinkley 1997, section 4.4), at most 1; and no less than 2^(1 - documents), which is the least that
    a sign test can give: few documents show nothing, however alike they are."""
    below, above = int((draws_B <= 0).sum()), int((draws_B >= 0).sum())
    least = 2.0 ** (1 - documents)
    return float(min(1.0, max(least, 2 * (min(below, above) + 1) / (len(draws_B) + 1))))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction (Holm 1979): the k-th smallest of m times m - k + 1, made to rise, at most 1."""
    order = np.argsort(p, kind="stable")
    corrected = [0.0] * len(p)
    highest = 0.0
    for rank, k in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[k]))
        corrected[k] = highest
    return corrected


def difference(
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    labels: Mapping[str, tuple[str, ...]],
    *,
    resamples: int,
    seed: int,
) -> tuple[Tested, dict[str, Tested]]:
    """(average, per tenant): macro-F1 of `after` less `before`'s, on the same resampled documents."""
    values, draws = paired_draws(before, after, dict(labels), resamples=resamples, seed=seed)
    documents = {tenant: len({p.document for p in before if p.tenant == tenant}) for tenant in values}
    return tested(values, draws, documents)


def tested(
    values: Mapping[str, float], draws: Mapping[str, Floats], documents: Mapping[str, int]
) -> tuple[Tested, dict[str, Tested]]:
    """(average, per tenant) from values, their bootstrap draws [B] and the number of documents by tenant."""
    raw = [p_value(draws[tenant], documents[tenant]) for tenant in values]
    each = {
        tenant: Tested(interval(values[tenant], draws[tenant]), p, corrected)
        for tenant, p, corrected in zip(values, raw, holm(raw), strict=True)
    }
    mean_B = np.mean([draws[t] for t in values], axis=0)
    return Tested(
        interval(float(np.mean(list(values.values()))), mean_B), p_value(mean_B, sum(documents.values()))
    ), each


def confusion(predictions: Sequence[Prediction], labels: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """Per tenant: gold labels (rows) against predicted ones (columns; the last is "(none)": no label)."""
    found = {}
    for tenant, names in labels.items():
        place = {name: k for k, name in enumerate(names)}
        counts = [[0] * (len(names) + 1) for _ in names]
        for p in predictions:
            if p.tenant == tenant:
                counts[place[p.gold]][len(names) if p.label is None else place[p.label]] += 1
        found[tenant] = {"labels": list(names), "predicted": [*names, "(none)"], "counts": counts}
    return found
