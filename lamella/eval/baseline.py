"""What needs no language model: TF-IDF with logistic regression, and the majority label."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline

from lamella.errors import UserError
from lamella.eval.metrics import Prediction
from lamella.eval.run import SystemResult, summarise
from lamella.eval.task import Task, TaskRow

ENTITY, TEXT = 0, 1


def make_classifier(seed: int = 0) -> Pipeline:
    """Word (1-2) and character (2-4) n-grams of the entity, word (1-2) n-grams of the text.

    Takes rows of [entity, text].
    """
    features = ColumnTransformer(
        [
            ("entity_words", TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\S+", sublinear_tf=True), ENTITY),
            ("entity_chars", TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True), ENTITY),
            ("text_words", TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\S+", sublinear_tf=True), TEXT),
        ]
    )
    return Pipeline(
        [("features", features), ("classifier", LogisticRegression(C=10, max_iter=2000, random_state=seed))]
    )


def _pairs(rows: Sequence[TaskRow]) -> list[list[str]]:
    return [[r.entity or r.text, r.text] for r in rows]


def _need_pool(task: Task, tenant: str) -> list[TaskRow]:
    pool = task.pool_of(tenant)
    if not pool:
        raise UserError(
            f"tenant {tenant!r} has no training rows for the baseline", fix="add `train` or use --no-baseline"
        )
    return pool


def _check_words(tenant: str, pool: Sequence[TaskRow], pairs: Sequence[list[str]]) -> None:
    """The vectorizers need one word in each of their columns."""
    for column, what in ((ENTITY, "`entity`"), (TEXT, "`text`")):
        if not any(pair[column].strip() for pair in pairs):
            path, line = pool[0].place or (None, None)
            raise UserError(
                f"TF-IDF is not possible: {what} of all {len(pool)} training rows of tenant {tenant!r} is blank",
                fix="correct the rows in `train`, or use --no-baseline", path=path, line=line,
            )  # fmt: skip


def _predictions(rows: Sequence[TaskRow], labels: Sequence[str]) -> list[Prediction]:
    return [
        Prediction(r.tenant, r.id if r.id is not None else "", r.document, r.label, label)
        for r, label in zip(rows, labels, strict=True)
    ]


def tfidf_baseline(task: Task, *, seed: int = 0, resamples: int = 1000) -> SystemResult:
    """One classifier per tenant, trained on the tenant's training rows.

    Raises:
        UserError: a tenant has no training rows, or only blank ones.
    """
    start_s = time.monotonic()
    found: list[Prediction] = []
    for tenant in task.tenants:
        pool, rows = _need_pool(task, tenant), task.rows_of(tenant)
        gold = [r.label for r in pool]
        if len(set(gold)) == 1:  # nothing to separate
            found += _predictions(rows, [gold[0]] * len(rows))
            continue
        pairs = _pairs(pool)
        _check_words(tenant, pool, pairs)
        model = make_classifier(seed).fit(pairs, gold)
        found += _predictions(rows, [str(label) for label in model.predict(_pairs(rows))])
    return summarise(task, "TF-IDF", found, mode="baseline", start_s=start_s, seed=seed,
                     resamples=resamples)  # fmt: skip


def majority_baseline(task: Task, *, seed: int = 0, resamples: int = 1000) -> SystemResult:
    """The most frequent training label of each tenant (ties: label order)."""
    start_s = time.monotonic()
    found: list[Prediction] = []
    for tenant in task.tenants:
        counts = Counter(r.label for r in _need_pool(task, tenant))
        rows = task.rows_of(tenant)
        found += _predictions(rows, [max(task.labels[tenant], key=lambda label: counts[label])] * len(rows))
    return summarise(task, "majority", found, mode="baseline", start_s=start_s, seed=seed, resamples=resamples)
