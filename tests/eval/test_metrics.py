import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from lamella.eval.labels import LabelParser, normalise_label, parse_generation
from lamella.eval.metrics import (
    Prediction,
    figure_replicates,
    macro_f1,
    measure,
    paired_difference,
    resample_weights,
    tenant_metrics,
)  # fmt: skip

LABELS3 = ("neg", "neu", "pos")


def predictions(gold, answers, documents=None, tenant="t"):
    documents = documents or [f"d{n}" for n in range(len(gold))]
    return [
        Prediction(tenant, n, d, g, a, "answered" if a is not None else "invalid")
        for n, (g, a, d) in enumerate(zip(gold, answers, documents, strict=True))
    ]


def parsed(texts, parser):
    return [parse_generation(t, stopped=True, parser=parser) for t in texts]


GOLD = ["pos", "pos", "neg", "neg", "neu", "neu"]
ANSWERS = ["pos", "Positive!", "neg", "", "neu", "pos/neg"]


def test_b81_strict_figures():
    read = parsed(ANSWERS, LabelParser(LABELS3, strict=True))
    rows = [Prediction("t", n, str(n), g, r.label, r.status) for n, (g, r) in enumerate(zip(GOLD, read, strict=True))]
    m = tenant_metrics(rows, LABELS3, "t")
    assert m.accuracy.value == 0.5
    assert m.macro_f1.value == pytest.approx(2 / 3)
    assert m.no_label == 3
    assert (m.invalid, m.empty, m.truncated) == (2, 1, 0)
    assert m.accuracy_answered == 1.0
    assert m.micro_f1.value == pytest.approx(2 / 3)
    assert any("invalid" in w for w in m.warnings)


def test_b81_normalised_figures():
    read = parsed(ANSWERS, LabelParser(LABELS3, {"positive": "pos"}))
    assert [r.label for r in read] == ["pos", "pos", "neg", None, "neu", None]
    assert read[5].status == "invalid"  # ambiguous: never the first match
    m = tenant_metrics(predictions(GOLD, [r.label for r in read]), LABELS3, "t")
    assert m.accuracy.value == pytest.approx(4 / 6)
    assert m.macro_f1.value == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)


@pytest.mark.parametrize(
    ("answer", "label"),
    [(" Pos ", "pos"), ("POS.", "pos"), ("“pos”", "pos"), ("**pos**", "pos"), ("pos\n", "pos"), ("ｐｏｓ", "pos"),
     ("pos neg", None), ("pos, neg", None), ("the answer is pos", None), ("po", None), ("!", None), ("", None)],
)  # fmt: skip
def test_normalised_answers_match_whole_labels_only(answer, label):
    assert LabelParser(LABELS3)(answer) == label


def test_labels_that_normalise_alike_match_exactly_only():
    parser = LabelParser(("C", "C++", "D"))
    assert [parser("C"), parser("C++"), parser("c"), parser("d.")] == ["C", "C++", None, "D"]
    assert normalise_label(" «C++»\n") == "c"


def test_b87_majority_answers_are_seen():
    gold = ["no"] * 95 + ["yes"] * 5
    m = tenant_metrics(predictions(gold, ["no"] * 100), ("no", "yes"), "t")
    assert m.accuracy.value == 0.95
    assert m.macro_f1.value == pytest.approx(0.487, abs=5e-4)
    assert (m.labels["no"].recall, m.labels["yes"].recall) == (1.0, 0.0)
    assert any("one label only" in w for w in m.warnings)


def test_b87_label_without_gold_rows_is_left_out_and_named():
    m = tenant_metrics(predictions(["a", "a", "b", "b"], ["a", "c", "b", "b"]), ("a", "b", "c"), "t")
    assert m.macro_f1.value == pytest.approx((2 / 3 + 1) / 2)
    assert m.absent_labels == ("c",)
    assert (m.labels["c"].support, m.labels["c"].predicted) == (0, 1)


def random_rows(seed, rows=300, documents=40, labels=("a", "b", "c", "d"), right=0.6):
    rng = np.random.default_rng(seed)
    gold = rng.choice(labels, rows)
    noise = rng.choice([*labels, "?"], rows)
    answers = [g if rng.random() < right else n for g, n in zip(gold, noise, strict=True)]
    docs = [f"d{n}" for n in rng.integers(0, documents, rows)]
    return predictions(gold.tolist(), [None if a == "?" else str(a) for a in answers], docs)


def test_figures_equal_scikit_learn():
    rows, labels = random_rows(0), ["a", "b", "c", "d"]
    gold, said = [r.gold for r in rows], [r.label or "?" for r in rows]
    m = tenant_metrics(rows, labels, "t")
    assert m.accuracy.value == accuracy_score(gold, said)
    assert m.macro_f1.value == pytest.approx(f1_score(gold, said, labels=labels, average="macro"))
    assert m.micro_f1.value == pytest.approx(f1_score(gold, said, labels=labels, average="micro"))
    each = f1_score(gold, said, labels=labels, average=None)
    assert [m.labels[x].f1 for x in labels] == pytest.approx(each.tolist())


def test_macro_f1_of_counts_equals_scikit_learn_with_absent_labels():
    gold, said = ["a", "a", "b"], ["a", "c", "a"]
    got = macro_f1(np.array([1, 0, 0]), np.array([1, 0, 1]), np.array([1, 1, 0]))
    assert got == pytest.approx(f1_score(gold, said, labels=["a", "b"], average="macro", zero_division=0))


def test_bootstrap_equals_resampling_documents_one_by_one():
    """An independent loop: draw documents, concatenate their rows, let scikit-learn measure all three figures."""
    rows, labels = random_rows(1, rows=120, documents=12), ["a", "b", "c", "d"]
    m = tenant_metrics(rows, labels, "t", resamples=4000, seed=3)
    rng = np.random.default_rng(99)
    documents = sorted({r.document for r in rows})
    values = {"macro_f1": [], "micro_f1": [], "accuracy": []}
    for _ in range(1000):
        drawn = [r for d in rng.choice(documents, len(documents)) for r in rows if r.document == d]
        gold = [r.gold for r in drawn]
        said = [r.label or "?" for r in drawn]
        present = [x for x in labels if x in gold]
        values["macro_f1"].append(f1_score(gold, said, labels=present, average="macro", zero_division=0))
        values["micro_f1"].append(f1_score(gold, said, labels=labels, average="micro", zero_division=0))
        values["accuracy"].append(accuracy_score(gold, said))
    for name, drawn_values in values.items():
        low, high = np.percentile(drawn_values, [2.5, 97.5])
        width, got = high - low, getattr(m, name)
        assert got.low == pytest.approx(low, abs=0.12 * width)
        assert got.high == pytest.approx(high, abs=0.12 * width)
        assert got.low < got.value < got.high


def test_figures_of_counts_equal_scikit_learn_in_every_resample():
    """The very draws: each resample written out as rows, measured by scikit-learn."""
    rows, labels = random_rows(7, rows=80, documents=9), ["a", "b", "c", "d"]
    got = figure_replicates(rows, labels, "t", 25, 2)
    documents = sorted({r.document for r in rows})
    for n, weights in enumerate(resample_weights(len(documents), "t", 25, 2)):
        drawn = [
            r
            for d, times in zip(documents, weights, strict=True)
            for r in rows
            if r.document == d
            for _ in range(times)
        ]
        gold, said = [r.gold for r in drawn], [r.label or "?" for r in drawn]
        present = [x for x in labels if x in gold]
        assert got["macro_f1"][n] == pytest.approx(
            f1_score(gold, said, labels=present, average="macro", zero_division=0)
        )
        assert got["micro_f1"][n] == pytest.approx(
            f1_score(gold, said, labels=labels, average="micro", zero_division=0)
        )
        assert got["accuracy"][n] == pytest.approx(accuracy_score(gold, said))


def test_rows_of_one_document_are_no_independent_evidence():
    rows = random_rows(2, rows=40, documents=40)
    copies = [
        Prediction(r.tenant, f"{r.id}-{n}", r.document, r.gold, r.label, r.status) for n in range(9) for r in rows
    ]
    labels = ("a", "b", "c", "d")
    once, often = (tenant_metrics(x, labels, "t", seed=1).macro_f1 for x in (rows, copies))
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_intervals_are_seeded_and_do_not_depend_on_row_order():
    rows, labels = random_rows(3), {"t": ("a", "b", "c", "d")}
    assert measure(rows, labels, seed=5) == measure(rows, labels, seed=5)
    assert measure(rows[::-1], labels, seed=5).average == measure(rows, labels, seed=5).average
    assert measure(rows, labels, seed=6).average != measure(rows, labels, seed=5).average


def test_average_is_over_tenants_not_rows():
    rows = predictions(["a", "b"], ["a", "b"], tenant="x") + predictions(["a", "b"] * 50, ["b", "a"] * 50, tenant="y")
    m = measure(rows, {"x": ("a", "b"), "y": ("a", "b")})
    assert m.average.value == 0.5
    assert m.average_accuracy.value == m.average_micro_f1.value == m.accuracy_answered == 0.5
    assert (m.tenants["x"].accuracy.value, m.tenants["y"].accuracy.value) == (1, 0)
    assert m.to_json()["tenants"]["x"]["invalid_rate"] == 0


def test_paired_difference_is_tighter_than_two_intervals():
    labels = {"t": ("a", "b", "c", "d")}
    before = random_rows(4, right=0.5)
    after = [Prediction(r.tenant, r.id, r.document, r.gold, r.gold) if n % 10 == 0 else r for n, r in enumerate(before)]
    d = paired_difference(before, after[::-1], labels)
    a, b = measure(before, labels).average, measure(after, labels).average
    assert d.average.value == pytest.approx(b.value - a.value)
    assert 0 < d.average.low < d.average.high
    assert d.average.high - d.average.low < 0.7 * (a.high - a.low)
    assert d.share_not_better == 0
    same = paired_difference(before, before, labels)
    assert (same.average.value, same.average.low, same.average.high) == (0, 0, 0)


def test_averages_have_intervals_of_the_mean_over_tenants_in_each_resample():
    parts = {t: [Prediction(t, *(getattr(r, k) for k in ("id", "document", "gold", "label", "status"))) for r in
                 random_rows(n)] for n, t in enumerate(("x", "y"))}  # fmt: skip
    labels = ("a", "b", "c", "d")
    m = measure([*parts["x"], *parts["y"]], dict.fromkeys(parts, labels), resamples=200, seed=4)
    draws = [figure_replicates(rows, labels, t, 200, 4) for t, rows in parts.items()]
    for name, average in (("macro_f1", m.average), ("micro_f1", m.average_micro_f1), ("accuracy", m.average_accuracy)):
        low, high = np.percentile((draws[0][name] + draws[1][name]) / 2, [2.5, 97.5])
        assert (average.low, average.high) == pytest.approx((low, high))
        assert average.value == pytest.approx(np.mean([getattr(t, name).value for t in m.tenants.values()]))
        assert average.low < average.value < average.high


def test_b85_accuracy_on_answered_rows_leaves_tenants_without_answers_out():
    rows = predictions(["a", "b"], [None, None], tenant="x") + predictions(["a", "b"], ["a", "a"], tenant="y")
    labels = {"x": ("a", "b"), "y": ("a", "b")}
    m = measure(rows, labels)
    assert (m.tenants["x"].accuracy_answered, m.tenants["y"].accuracy_answered, m.accuracy_answered) == (None, 0.5, 0.5)
    assert m.average_accuracy.value == 0.25
    assert measure(rows[:2], labels).accuracy_answered is None
