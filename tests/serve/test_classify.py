"""/v1/classify asks what `lamella eval` asks, and reads the answer as it does; chats are encoded as in training."""

import asyncio

import numpy as np
import pytest

from lamella.config import DataConfig
from lamella.data.dataset import encode_dataset
from lamella.data.encode import load_tokenizer
from lamella.errors import UserError
from lamella.eval.encoder import StoreEncoder
from lamella.eval.run import encode_questions, label_predictions
from lamella.eval.task import TaskRow, build_task, read_task_config
from lamella.serve.backend import ScoreRequest
from lamella.serve.classify import task_of
from tests.export.conftest import T1
from tests.fixtures import chat12, write_jsonl
from tests.serve.conftest import serving
from tests.serve.fake import FakeBackend, write_adapter

DOCUMENTS = [
    {"text": "12 Main street", "entity": "Main", "id": "x"},
    {"text": "the city", "id": 7},
    {"text": "12 Main street"},
]


def eval_says(texts, backend, name, mode):
    """Labels of `DOCUMENTS` by evaluation's own path, over the same scores."""
    config = read_task_config(texts / "task.toml")
    rows = [TaskRow(tenant=name, text=d["text"], entity=d.get("entity", ""), label=config.labels[name][0], id=n)
            for n, d in enumerate(DOCUMENTS)]  # fmt: skip
    other = {tenant: config.labels[tenant] for tenant in (name,)}
    task = build_task(config.model_copy(update={"labels": other}), [], rows)
    encoder = StoreEncoder.open(texts / "store", texts / name)
    ((rows, prompts, trie),) = encode_questions(task, None, encoder, mode=mode).tenants
    edges = asyncio.run(backend.score(ScoreRequest("x", name, tuple(prompts), trie)))
    return prompts, label_predictions(rows, trie, edges, mode, False)


@pytest.mark.parametrize("mode", ["likelihood", "constrained"])
@pytest.mark.parametrize("name", ["left", "right"])
def test_labels_are_those_of_eval(served, texts, name, mode):
    body = {"model": name, "documents": DOCUMENTS, "mode": mode}
    tree = served.client.post("/v1/classify", json=body).json()
    prompts, wanted = eval_says(texts, served.backend, name, mode)
    assert served.backend.seen[0].prompts == tuple(prompts)
    for n, (got, said) in enumerate(zip(tree["results"], wanted, strict=True)):
        assert got["label"] == said.label
        assert got["probabilities"] == pytest.approx(said.probabilities)
        assert got["logprobs"] == pytest.approx(said.scores)
        assert got["margin"] == pytest.approx(said.margin)
        assert (got["index"], got["id"]) == (n, DOCUMENTS[n].get("id"))
        assert got["usage"]["prompt_tokens"] == len(prompts[n])
    assert tree["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert (tree["task"], tree["tenant"]) == ("places", name)
    assert np.isclose(sum(tree["results"][0]["probabilities"].values()), 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"model": "base"}, "model"), ({"model": "left", "documents": []}, "documents"), ({"model": "left", "mode": "generate"}, "mode"),
     ({"model": "left", "documents": [{"entity": "x"}]}, "documents.0.text"),
     ({"model": "left", "documents": [{"text": "long " * 500}]}, "documents.0"),
     ({"model": "left", "documents": [{"text": "a"}] * 300}, "documents"), ({"model": "left", "threshold": 1}, "threshold")],
)  # fmt: skip
def test_requests_that_cannot_be_answered(served, body, param):
    response = served.client.post("/v1/classify", json={"documents": [{"text": "a"}], **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_models_tell_their_labels(served):
    found = {m["id"]: m for m in served.client.get("/v1/models").json()["data"]}
    assert found["right"]["labels"] == ["onion", "basil"]
    assert "labels" not in found["base"]


def write_task(folder, tenants, rows=()):
    labels = "".join(f'{t} = ["a", "b"]\n' for t in tenants)
    data = "" if not rows else 'test = "rows.jsonl"\n'
    (folder / "task.toml").write_text(f'name = "t"\nprompt = "{{text}}"\n{data}[labels]\n{labels}')
    if rows:
        write_jsonl(folder / "rows.jsonl", list(rows))
    return folder / "task.toml"


def test_the_tenant_of_a_model(tmp_path):
    path = write_task(tmp_path, ["one", "two"])
    assert task_of(path, "one", "x")[1] == "one"
    assert task_of(path, None, "two")[1] == "two"
    assert task_of(write_task(tmp_path, ["one"]), None, "x")[1] == "one"
    rows = [{"tenant": t, "text": "x", "label": label} for t in ("three", "four") for label in ("u", "v")]
    path = write_task(tmp_path, [], rows)
    task, tenant = task_of(path, "three", "x")
    assert (task.labels[tenant], tenant) == (("u", "v"), "three")
    with pytest.raises(UserError, match="several tenants"):
        task_of(path, None, "x")
    with pytest.raises(UserError, match="nearest: 'three'"):
        task_of(path, "thre", "x")


def test_b79_served_prompts_are_those_of_training(texts, tokenizer, tmp_path):
    """The adapter was trained with another template and system text than the store's tokenizer has; chats, labels and
    stop ids of the server are its training's."""
    (tmp_path / "t1.jinja").write_text(T1)
    path = write_jsonl(tmp_path / "rows.jsonl", chat12())
    settings = DataConfig(train=(path,), system="Be short.", chat_template=tmp_path / "t1.jinja")
    trained = encode_dataset(settings, load_tokenizer(texts / "store")).rows
    write_adapter(tmp_path / "tuned", "basil", system="Be short.", template=T1)
    backend = FakeBackend(tokenizer)
    found = serving(texts, tokenizer, backend=backend, adapters=())
    found.registry.add("tuned", tmp_path / "tuned")
    for row, source in zip(trained, chat12(), strict=True):
        question, answer = source["messages"]
        body = {"model": "tuned", "messages": [question], "guided_choice": [answer["content"], "basil"]}
        assert found.client.post("/v1/chat/completions", json=body).status_code == 200
        asked = backend.seen[-1]
        first = row.label_mask.find(1)
        assert list(asked.prompt) == list(row.input_ids[:first])
        labels = [token for token, label in zip(row.input_ids, row.label_mask, strict=True) if label]
        assert list(asked.choices[0]) == labels
        assert labels[-1] in asked.stop_ids
        given = [{"role": "system", "content": [{"type": "text", "text": "Be short."}]}, question]
        found.client.post("/v1/chat/completions", json={**body, "messages": given})
        assert backend.seen[-1].prompt == asked.prompt
        found.client.post("/v1/chat/completions", json={**body, "model": "base"})
        assert backend.seen[-1].prompt != asked.prompt
