"""Accuracy, macro-F1 and micro-F1 with bootstrap intervals over documents, all three from the same draws.

Rules, everywhere the same:
- The label set is the task's, fixed before anything is predicted. An answer that is no label (invalid, truncated,
  empty) is wrong: a miss for the gold label, a false alarm for none.
- A label without gold rows in what is measured has no recall; it is left out of the macro average and named.
  Predicting it still is a miss for the gold label.
- A label that has gold rows and no right answer has F1 0.
- Micro-F1 counts over all labels of a tenant: an answer that is no label costs recall alone, so with such answers it lies
  above accuracy, and without them the two are equal.

Shape suffixes: D documents, L labels, B resamples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from sklearn.metrics import f1_score, precision_recall_fscore_support

from lamella.eval.labels import Status

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MACRO_RULE = "macro-F1 averages over the labels that have gold rows; invalid, truncated and empty answers are wrong"
WARN_SHARE = 0.05


@dataclass(frozen=True)
class Prediction:
    """One row's outcome.

    Attributes:
        label: predicted label; None unless status is "answered".
        scores: log-probability by label, where the mode gives one.
        probabilities: scores normalised over the labels.
        margin: score of the best label less that of the second best, in nats.
        output, reasoning: what was generated, in free generation.
    """

    tenant: str
    id: str | int
    document: str
    gold: str
    label: str | None
    status: Status = "answered"
    scores: dict[str, float] | None = None
    probabilities: dict[str, float] | None = None
    margin: float | None = None
    output: str | None = None
    reasoning: str | None = None

    @property
    def correct(self) -> bool:
        return self.label == self.gold


@dataclass(frozen=True)
class Interval:
    """A figure and its percentile bootstrap interval at 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]".replace("0.", ".")


@dataclass(frozen=True)
class LabelMetrics:
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int


@dataclass(frozen=True)
class TenantMetrics:
    """Figures of one tenant.

    Attributes:
        accuracy: right answers among all rows.
        accuracy_answered: right answers among answered rows; None when there is none.
        no_label: answers that gave no label: invalid, truncated and empty together.
    """

    rows: int
    documents: int
    accuracy: Interval
    accuracy_answered: float | None
    macro_f1: Interval
    micro_f1: Interval
    invalid: int
    truncated: int
    empty: int
    no_label: int
    labels: dict[str, LabelMetrics]
    absent_labels: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Metrics:
    """Figures of one system; averages are unweighted means over tenants.

    Attributes:
        average: macro-F1.
        accuracy_answered: over tenants with answered rows; None when there is none.
    """

    tenants: dict[str, TenantMetrics]
    average: Interval
    average_accuracy: Interval
    average_micro_f1: Interval
    accuracy_answered: float | None
    rows: int
    invalid: int
    truncated: int
    empty: int
    no_label: int
    resamples: int
    seed: int

    @property
    def warnings(self) -> list[str]:
        return [f"{tenant}: {w}" for tenant, m in self.tenants.items() for w in m.warnings]

    def to_json(self) -> dict[str, Any]:
        """Plain values; rates beside counts."""
        tree = asdict(self)
        for part in (tree, *tree["tenants"].values()):
            for name in ("invalid", "truncated", "empty", "no_label"):
                part[f"{name}_rate"] = part[name] / part["rows"]
        return tree


def macro_f1(tp_xL: NDArray, fp_xL: NDArray, fn_xL: NDArray) -> Floats:
    """Macro-F1 along the last axis, over labels with gold rows (tp + fn > 0); 0 where there is none."""
    present = (tp_xL + fn_xL) > 0
    f1 = np.where(present, 2 * tp_xL / np.maximum(2 * tp_xL + fp_xL + fn_xL, 1), 0.0)
    return f1.sum(-1) / np.maximum(present.sum(-1), 1)


def micro_f1(tp_xL: NDArray, fp_xL: NDArray, fn_xL: NDArray) -> Floats:
    """Micro-F1 along the last axis: F1 of the counts of all labels together."""
    tp, fp, fn = tp_xL.sum(-1), fp_xL.sum(-1), fn_xL.sum(-1)
    return 2 * tp / np.maximum(2 * tp + fp + fn, 1)


def accuracy(tp_xL: NDArray, fp_xL: NDArray, fn_xL: NDArray) -> Floats:
    """Share of right answers along the last axis; every row is a right answer or a miss of its gold label."""
    tp, fn = tp_xL.sum(-1), fn_xL.sum(-1)
    return tp / np.maximum(tp + fn, 1)


FIGURES = {"macro_f1": macro_f1, "micro_f1": micro_f1, "accuracy": accuracy}


def document_counts(rows: Sequence[Prediction], labels: Sequence[str]) -> tuple[Ints, Ints, Ints]:
    """(true positives, false positives, false negatives), each int64 [D, L], documents sorted by key."""
    documents = {key: n for n, key in enumerate(sorted({r.document for r in rows}))}
    column = {label: n for n, label in enumerate(labels)}
    tp, fp, fn = (np.zeros((len(documents), len(labels)), dtype=np.int64) for _ in range(3))
    for row in rows:
        at = documents[row.document]
        if row.correct:
            tp[at, column[row.gold]] += 1
            continue
        fn[at, column[row.gold]] += 1
        if row.label is not None:
            fp[at, column[row.label]] += 1
    return tp, fp, fn


def resample_weights(documents: int, tenant: str, resamples: int, seed: int) -> Ints:
    """How often each document is drawn: int64 [B, D]. The same for every system on the same documents."""
    rng = np.random.default_rng([seed, xxhash.xxh3_64_intdigest(tenant.encode("utf-8", "surrogatepass"))])
    return rng.multinomial(documents, np.full(documents, 1 / documents), size=resamples)


def figure_replicates(
    rows: Sequence[Prediction], labels: Sequence[str], tenant: str, resamples: int, seed: int
) -> dict[str, Floats]:
    """Each of `FIGURES` for one tenant in each resample of its documents: name -> float64 [B]."""
    counts = document_counts(rows, labels)
    weights_BD = resample_weights(len(counts[0]), tenant, resamples, seed)
    tp, fp, fn = (weights_BD @ count_DL for count_DL in counts)
    return {name: figure(tp, fp, fn) for name, figure in FIGURES.items()}


def interval(value: float, replicates_B: Floats) -> Interval:
    low, high = np.percentile(replicates_B, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def _warnings(rows: Sequence[Prediction]) -> tuple[str, ...]:
    counts = Counter(r.status for r in rows)
    lines = [
        f"{100 * counts[status] / len(rows):.1f} % of answers {status} ({counts[status]} of {len(rows)}): counted wrong"
        for status in ("truncated", "empty", "invalid")
        if counts[status] > WARN_SHARE * len(rows)
    ]
    predicted = {r.label for r in rows if r.label is not None}
    if len(predicted) == 1 and len({r.gold for r in rows}) > 1:
        n = sum(r.label is not None for r in rows)
        lines.append(f"one label only is predicted: `{predicted.pop()}` ({n} of {len(rows)} rows)")
    return tuple(lines)


def tenant_metrics(
    rows: Sequence[Prediction], labels: Sequence[str], tenant: str, *, resamples: int = 1000, seed: int = 0
) -> TenantMetrics:
    """All figures of one tenant's rows over its fixed label set."""
    return _tenant_metrics(rows, labels, figure_replicates(rows, labels, tenant, resamples, seed))


def _tenant_metrics(rows: Sequence[Prediction], labels: Sequence[str], replicates: dict[str, Floats]) -> TenantMetrics:
    column = {label: n for n, label in enumerate(labels)}
    gold = np.array([column[r.gold] for r in rows])
    predicted = np.array([-1 if r.label is None else column[r.label] for r in rows])  # -1: no label, never averaged
    each = list(range(len(labels)))
    precision, recall, f1, support = precision_recall_fscore_support(gold, predicted, labels=each, zero_division=0)
    present = [n for n in each if support[n]]
    absent = tuple(labels[n] for n in each if not support[n])
    counts = Counter(r.status for r in rows)
    right = sum(r.correct for r in rows)
    return TenantMetrics(
        rows=len(rows),
        documents=len({r.document for r in rows}),
        accuracy=interval(right / len(rows), replicates["accuracy"]),
        accuracy_answered=right / counts["answered"] if counts["answered"] else None,
        macro_f1=interval(f1[present].mean(), replicates["macro_f1"]),
        micro_f1=interval(
            f1_score(gold, predicted, labels=each, average="micro", zero_division=0), replicates["micro_f1"]
        ),
        invalid=counts["invalid"],
        truncated=counts["truncated"],
        empty=counts["empty"],
        no_label=len(rows) - counts["answered"],
        labels={
            label: LabelMetrics(
                float(precision[n]), float(recall[n]), float(f1[n]), int(support[n]), int((predicted == n).sum())
            )
            for label, n in column.items()
        },
        absent_labels=absent,
        warnings=_warnings(rows),
    )


def _by_tenant(rows: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    parts: dict[str, list[Prediction]] = {}
    for row in rows:
        parts.setdefault(row.tenant, []).append(row)
    return parts


def measure(
    rows: Sequence[Prediction], labels: dict[str, tuple[str, ...]], *, resamples: int = 1000, seed: int = 0
) -> Metrics:
    """Figures per tenant and their average, with intervals from resampling each tenant's documents."""
    parts = _by_tenant(rows)
    replicates = {t: figure_replicates(part, labels[t], t, resamples, seed) for t, part in parts.items()}
    tenants = {t: _tenant_metrics(part, labels[t], replicates[t]) for t, part in parts.items()}
    counts = Counter(r.status for r in rows)
    answered = [m.accuracy_answered for m in tenants.values() if m.accuracy_answered is not None]

    def average(figure: str) -> Interval:
        value = float(np.mean([getattr(m, figure).value for m in tenants.values()]))
        return interval(value, np.mean([by_name[figure] for by_name in replicates.values()], axis=0))

    return Metrics(
        tenants=tenants,
        average=average("macro_f1"),
        average_accuracy=average("accuracy"),
        average_micro_f1=average("micro_f1"),
        accuracy_answered=float(np.mean(answered)) if answered else None,
        rows=len(rows),
        invalid=counts["invalid"],
        truncated=counts["truncated"],
        empty=counts["empty"],
        no_label=len(rows) - counts["answered"],
        resamples=resamples,
        seed=seed,
    )


@dataclass(frozen=True)
class Difference:
    """Macro-F1 of the second system less the first's, on the same resampled documents."""

    tenants: dict[str, Interval]
    average: Interval
    share_not_better: float
    """Share of resamples in which the second system's average is no better."""


def paired_draws(
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    labels: dict[str, tuple[str, ...]],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[dict[str, float], dict[str, Floats]]:
    """Macro-F1 of the second system less the first's by tenant: as measured, and in each resample [B] of the documents.

    Args:
        before, after: predictions of two systems for the same rows, in any order.
    """
    pairs = [{(r.tenant, r.id): (r.document, r.gold) for r in rows} for rows in (before, after)]
    assert pairs[0] == pairs[1], "paired systems must answer the same rows"
    differences, draws = {}, {}
    first, second = _by_tenant(before), _by_tenant(after)
    for tenant, part in first.items():
        values, replicates = [], []
        for rows in (part, second[tenant]):
            values.append(macro_f1(*(c.sum(0) for c in document_counts(rows, labels[tenant]))))
            replicates.append(figure_replicates(rows, labels[tenant], tenant, resamples, seed)["macro_f1"])
        draws[tenant] = replicates[1] - replicates[0]
        differences[tenant] = float(values[1] - values[0])
    return differences, draws


def paired_difference(
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    labels: dict[str, tuple[str, ...]],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Difference:
    """Paired bootstrap over documents: both systems are measured on the same draws.

    Args:
        before, after: predictions of two systems for the same rows, in any order.
    """
    values, draws = paired_draws(before, after, labels, resamples=resamples, seed=seed)
    mean_B = np.mean(list(draws.values()), axis=0)
    tenants = {tenant: interval(value, draws[tenant]) for tenant, value in values.items()}
    average = interval(float(np.mean(list(values.values()))), mean_B)
    return Difference(tenants, average, float((mean_B <= 0).mean()))
