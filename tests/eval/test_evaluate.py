"""The model's label scores: packed trees against plain transformers, one sequence at a time."""

import math

import pytest
import torch

from lamella.errors import RunFailed, UserError
from lamella.eval.run import evaluate
from lamella.eval.scoring import drop_unread, plan_batches, prompt_tree, score_prompts
from lamella.eval.trie import LabelTrie
from lamella.models.layout import Tree, pack_trees
from tests.eval.oracle import OracleEngine, SaysEngine, TokenizerEncoder
from tests.fixtures import make_tokenizer

FEW = dict(resamples=20)


def direct_scores(model, prompt, answers):
    """Sum of log-probabilities of each answer after the prompt, each in a forward pass of its own."""
    out = []
    for answer in answers:
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logps = torch.log_softmax(model(ids).logits[0].double(), -1)
        at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        out.append(float(logps[at, ids[0, at + 1]].sum()))
    return out


@pytest.mark.parametrize("shots", [0, 4])
def test_likelihood_equals_one_forward_per_prompt_and_label(task, engine, encoder, model, shots):
    task = task.limited(10)
    result = evaluate(task, engine, encoder, shots=shots, batch_tokens=1500, **FEW)
    assert [p.id for p in result.predictions] == [r.id for t in task.tenants for r in task.rows_of(t)]
    rows = {r.id: r for r in task.test}
    for p in result.predictions[::3]:
        labels = task.labels[p.tenant]
        prompt = encoder.prompt_ids(task.messages(rows[p.id], task.choose_shots(p.tenant, shots)))
        want = direct_scores(model, prompt, [encoder.answer_ids(label) for label in labels])
        assert list(p.scores.values()) == pytest.approx(want, abs=1e-4)
        best = max(range(len(labels)), key=lambda n: want[n])
        assert p.label == labels[best]
        total = sum(math.exp(w) for w in want)
        assert p.probabilities[p.label] == pytest.approx(math.exp(want[best]) / total, abs=1e-4)
        assert p.margin == pytest.approx(want[best] - sorted(want)[-2], abs=2e-4)


def test_length_normalisation_divides_by_label_tokens(task, engine, encoder):
    plain = evaluate(task, engine, encoder, **FEW).predictions[0]
    per_token = evaluate(task, engine, encoder, length_normalise=True, **FEW).predictions[0]
    for label, score in plain.scores.items():
        assert per_token.scores[label] == pytest.approx(score / len(encoder.answer_ids(label)))


def test_few_shot_prefix_is_computed_once(task, model, encoder):
    shared, alone = OracleEngine(model), OracleEngine(model)
    task = task.limited(8)
    a = evaluate(task, shared, encoder, shots=4, batch_tokens=4096, **FEW)
    b = evaluate(task, alone, encoder, shots=4, batch_tokens=1, **FEW)
    assert shared.tokens_seen < 0.5 * alone.tokens_seen
    for p, q in zip(a.predictions, b.predictions, strict=True):
        assert list(p.scores.values()) == pytest.approx(list(q.scores.values()), abs=1e-4)
        assert p.label == q.label


@pytest.mark.parametrize("mode", ["likelihood", "constrained", "generate"])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_b83_same_numbers_at_any_batch_size(task, engine, mode, padding_side):
    tokenizer = make_tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = padding_side, tokenizer.eos_token
    encoder = TokenizerEncoder(tokenizer)
    results = [
        evaluate(task, engine, encoder, mode=mode, batch_tokens=tokens, walk_tokens=walk, max_new_tokens=4, **FEW)
        for tokens, walk in ((1, 1), (700, 1400), (100_000, 100_000))
    ]
    for other in results[1:]:
        assert other.metrics == results[0].metrics
        for p, q in zip(results[0].predictions, other.predictions, strict=True):
            assert (p.id, p.label, p.status, p.output) == (q.id, q.label, q.status, q.output)
            if p.scores is not None:
                assert list(p.scores.values()) == pytest.approx(list(q.scores.values()), abs=1e-4)


def test_constrained_walk_is_constrained_greedy_decoding(task, engine, encoder):
    result = evaluate(task, engine, encoder, mode="constrained", batch_tokens=2000, **FEW)
    rows = {r.id: r for r in task.test}
    for p in result.predictions:
        answers = {label: encoder.answer_ids(label) for label in task.labels[p.tenant]}
        prompt, written = encoder.prompt_ids(task.messages(rows[p.id])), []
        while written not in answers.values():  # step by step: mask all but the tokens some label allows
            allowed = sorted({ids[len(written)] for ids in answers.values() if ids[: len(written)] == written})
            logps = engine.logps([*prompt, *written])
            written.append(max(allowed, key=lambda token: logps[token]))
        assert answers[p.label] == written
    likelihood = evaluate(task, engine, encoder, **FEW)
    assert any(p.label != q.label for p, q in zip(result.predictions, likelihood.predictions, strict=True))


def test_ties_go_to_the_earlier_label():
    trie = LabelTrie(("b", "a", "c"), [[7, 1], [3, 1], [7, 2]])
    even = torch.zeros(trie.num_edges).double().numpy()
    assert trie.labels[trie.greedy(even)] == "b"
    even[trie.paths[0][0]] = -1  # the branch that b and c share
    assert trie.labels[trie.greedy(even)] == "a"


def test_trie_refuses_labels_that_cannot_be_told_apart():
    with pytest.raises(UserError, match="same tokens"):
        LabelTrie(("x", "y"), [[1, 2], [1, 2]])
    with pytest.raises(UserError, match="no tokens"):
        LabelTrie(("x", "y"), [[1, 2], []])
    with pytest.raises(UserError, match="beginning of another"):
        LabelTrie(("x", "y"), [[1], [1, 2]])


def test_plan_keeps_the_budget_and_every_prompt(task, encoder):
    trie = LabelTrie(("a", "b"), [[1, 4], [2, 3, 4]])
    prompts = [tuple(encoder.prompt_ids(task.messages(r))) for r in task.test]
    prompts.append(prompts[0])  # an equal prompt is scored once
    for budget in (1, 300, 5000):
        batches = plan_batches(prompts, trie, budget)
        members = sorted(n for b in batches for n in b.prompts)
        assert members == list(range(len(prompts) - 1))
        assert all(b.batch.tokens <= budget or len(b.prompts) == 1 for b in batches)
        assert all(b.batch.score_tokens.numel() == len(b.prompts) * trie.num_edges for b in batches)


def test_prompt_tree_puts_a_whole_prompt_before_its_continuations():
    tree = prompt_tree([(1, 2), (1, 2, 3), (1, 2, 4)], [Tree([9], [True])])
    batch = pack_trees([tree])
    assert batch.input_ids.tolist() == [1, 2, 9, 3, 9, 4, 9]
    assert batch.score_positions.tolist() == [1, 3, 5]
    short = drop_unread(batch)
    assert short.input_ids.tolist() == [1, 2, 3, 4]
    assert short.visible_until.tolist() == [4, 4, 3, 4]
    assert short.score_positions.tolist() == [1, 2, 3]


def test_nan_from_the_model_fails_the_run():
    class NanEngine:
        def score(self, batches):
            return [torch.full((b.score_tokens.numel(),), float("nan")) for b in batches]

    trie = LabelTrie(("a", "b"), [[1, 4], [2, 4]])
    with pytest.raises(RunFailed, match="NaN"):
        score_prompts(NanEngine(), [(5, 6)], trie, batch_tokens=10, walk_tokens=10)


def test_prompt_beyond_the_context_is_refused(task, engine, encoder, monkeypatch):
    monkeypatch.setattr(engine.config, "max_position_embeddings", 100)
    with pytest.raises(UserError, match="do not fit the model's context of 100"):
        evaluate(task, engine, encoder, **FEW)


def test_label_modes_refuse_a_template_that_opens_reasoning(task, engine):
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    with pytest.raises(UserError, match="opens <think>"):
        evaluate(task, engine, TokenizerEncoder(tokenizer), **FEW)


def test_b85_reasoning_never_reaches_the_parser(task, encoder):
    right = {r.id: r.label for r in task.test}
    outputs, want = [], []
    for tenant in task.tenants:
        for n, row in enumerate(task.rows_of(tenant)):
            gold = right[row.id]
            text, status = [
                (f"<think>a city?</think>\n\n{gold}", "answered"),
                (f"<think>it is {gold} " + "or " * 40, "truncated"),
                (f"<think>it is {gold}</think>\n", "empty"),
                (gold.upper() + ".", "answered"),
                (f"hm, {gold}</think>{gold}", "answered"),
                (f"<think>{gold}", "empty"),
                (f"<think>x</think>it is {gold}", "invalid"),
            ][n % 7]
            outputs.append(text)
            want.append(status)
    result = evaluate(task, SaysEngine(encoder, outputs), encoder, mode="generate", max_new_tokens=32, **FEW)
    assert [p.status for p in result.predictions] == want
    m = result.metrics
    assert (m.truncated, m.empty, m.invalid) == tuple(want.count(s) for s in ("truncated", "empty", "invalid"))
    assert m.average_accuracy.value == pytest.approx(want.count("answered") / len(want))
    assert m.accuracy_answered == 1.0
    for p in result.predictions:
        assert "think>" not in p.output
        assert p.label == (p.gold if p.status == "answered" else None)
    for tenant in task.tenants:
        assert m.tenants[tenant].accuracy_answered == 1.0
        assert any("truncated" in w for w in m.tenants[tenant].warnings)
        assert any("empty" in w for w in m.tenants[tenant].warnings)


def test_b85_reasoning_opened_by_the_prompt(task):
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    encoder = TokenizerEncoder(tokenizer)
    outputs = ["city" if n % 2 else "so</think>city" for n in range(len(task.test))]
    result = evaluate(task, SaysEngine(encoder, outputs), encoder, mode="generate", max_new_tokens=32, **FEW)
    assert {p.status for p in result.predictions[1::2]} == {"empty"}
    assert {p.label for p in result.predictions[::2]} == {"city"}
