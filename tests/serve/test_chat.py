"""Chat and plain completions, over a backend whose answers are known."""

import json

import pytest

from lamella.eval.encoder import StoreEncoder
from tests.serve.conftest import chat, serving
from tests.serve.fake import FakeBackend, edge_logp


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_is_the_adapters_own(served):
    for model, said in (("left", "street name é"), ("right", "basil"), ("base", "I am the base.")):
        tree = served.client.post("/v1/chat/completions", json=chat(model)).json()
        assert tree["object"] == "chat.completion"
        assert tree["choices"][0]["message"]["content"] == said
        assert tree["choices"][0]["finish_reason"] == "stop"
        assert tree["model"] == model
        request = served.backend.seen[-1]
        written = len(served.backend.ids(said))
        assert tree["usage"] == {
            "prompt_tokens": len(request.prompt), "completion_tokens": written,
            "total_tokens": len(request.prompt) + written, "completion_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip


def test_what_is_asked_reaches_the_engine(served, texts):
    body = chat(
        temperature=0.5, top_p=0.25, top_k=7, seed=11, n=2, max_completion_tokens=5, logprobs=True, top_logprobs=2
    )
    assert served.client.post("/v1/chat/completions", json=body).status_code == 200
    one, two = served.backend.seen[-2:]
    encoder = StoreEncoder.open(texts / "store", texts / "left")
    assert list(one.prompt) == encoder.prompt_ids(body["messages"])
    assert one.stop_ids == encoder.stop_ids
    assert (one.adapter, one.max_new_tokens, one.top_logprobs) == ("left", 5, 2)
    sampling = one.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 11)
    assert two.sampling.seed == 12
    assert served.client.post("/v1/chat/completions", json=chat()).status_code == 200
    assert served.backend.seen[-1].sampling.temperature == 1.0


def test_a_stream_gives_the_same_text_as_the_whole(served):
    for model in ("left", "thinker"):
        body = chat(model, n=2, logprobs=True, top_logprobs=1)
        whole = served.client.post("/v1/chat/completions", json=body).json()
        more = {"stream": True, "stream_options": {"include_usage": True}}
        found = events(served.client.post("/v1/chat/completions", json={**body, **more}))
        assert found[-1]["choices"] == []
        assert found[-1]["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in found[:-1])
        for index, choice in enumerate(whole["choices"]):
            mine = [e["choices"][0] for e in found[:-1] if e["choices"][0]["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
            thought = "".join(c["delta"].get("reasoning_content", "") for c in mine)
            assert thought == choice["message"].get("reasoning_content", "")
            told = [t for c in mine if c["logprobs"] for t in c["logprobs"]["content"]]
            assert told == choice["logprobs"]["content"]
            assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]


def test_reasoning_is_apart(served):
    tree = served.client.post("/v1/chat/completions", json=chat("thinker")).json()
    message = tree["choices"][0]["message"]
    assert message["reasoning_content"] == "hm, a city"
    assert message["content"] == "the city"
    assert 0 < tree["usage"]["completion_tokens_details"]["reasoning_tokens"] < tree["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("stop", "said"), [("name", "street "), (["é", "eet"], "str"), ("nowhere", "street name é"), (" é", "street name")]
)
def test_stop_strings_end_the_answer_and_the_work(served, stop, said):
    for stream in (False, True):
        response = served.client.post("/v1/chat/completions", json=chat(stop=stop, stream=stream))
        if stream:
            got = "".join(e["choices"][0]["delta"].get("content", "") for e in events(response))
        else:
            got = response.json()["choices"][0]["message"]["content"]
            assert response.json()["choices"][0]["finish_reason"] == "stop"
        assert got == said
    assert served.backend.running == 0


def test_max_tokens_cuts_and_says_so(served):
    tree = served.client.post("/v1/chat/completions", json=chat(max_tokens=1)).json()
    assert tree["choices"][0]["finish_reason"] == "length"
    assert tree["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        ({"guided_choice": ["onion", "basil"]}, "basil"),
        ({"structured_outputs": {"choice": ["onion", "basil"]}}, "basil"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["onion", "basil"]}}}},
         '"basil"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {
            "type": "object", "properties": {"label": {"type": "string", "enum": ["onion", "basil"]}},
            "required": ["label"], "additionalProperties": False}}}}, '{"label": "basil"}'),
    ],
)  # fmt: skip
def test_labels_alone_may_be_written(served, texts, asked, content):
    tree = served.client.post("/v1/chat/completions", json=chat("right", **asked)).json()
    assert tree["choices"][0]["message"]["content"] == content
    encoder = StoreEncoder.open(texts / "store", texts / "right")
    assert [list(c) for c in served.backend.seen[-1].choices] == [encoder.answer_ids(x) for x in ("onion", "basil")]
    found = events(served.client.post("/v1/chat/completions", json=chat("right", stream=True, **asked)))
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in found) == content


def test_plain_completions(served):
    tree = served.client.post("/v1/completions", json={"model": "left", "prompt": ["a", "b c"], "n": 2}).json()
    assert [c["text"] for c in tree["choices"]] == ["street name é"] * 4
    assert [c["index"] for c in tree["choices"]] == [0, 1, 2, 3]
    prompts = [r.prompt for r in served.backend.seen[-4:]]
    assert tree["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    assert served.backend.seen[-1].max_new_tokens == 16
    served.client.post("/v1/completions", json={"model": "left", "prompt": [[5, 6, 7], [8]]})
    assert [r.prompt for r in served.backend.seen[-2:]] == [(5, 6, 7), (8,)]
    found = events(served.client.post("/v1/completions", json={"model": "left", "prompt": [5], "stream": True}))
    assert "".join(e["choices"][0]["text"] for e in found) == "street name é"


def test_prompts_are_scored(served):
    body = {"model": "left", "prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = served.client.post("/v1/completions", json=body).json()["choices"][0]
    asked = served.backend.seen[-1]
    assert asked.prompts == ((5,),)
    assert asked.trie.num_edges == 2
    assert asked.trie.branches[0].tokens == [6, 7]
    wanted = [None, *(edge_logp("street name é", (5,), e) for e in range(2))]
    assert choice["logprobs"]["token_logprobs"] == wanted
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"][0] == 0
    assert choice["logprobs"]["top_logprobs"] == [None, {}, {}]
    several = served.client.post("/v1/completions", json={**body, "prompt": [[5, 6, 7], [9]], "n": 2}).json()["choices"]
    assert [c["logprobs"]["token_logprobs"] for c in several] == [wanted, wanted, [None], [None]]
    most = served.client.post("/v1/completions", json={**body, "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert most["token_logprobs"] == wanted
    for own, text, top in zip(wanted[1:], most["tokens"][1:], most["top_logprobs"][1:], strict=True):
        assert max(top.values()) == -0.25
        assert top[text] == own
    more = served.client.post("/v1/completions", json={**body, "max_tokens": 2}).json()["choices"][0]
    assert more["logprobs"]["token_logprobs"] == [*wanted, -0.5, -1.5]
    assert more["text"].startswith(choice["text"])
    assert more["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tempature": 1}, "tempature"), ({"tools": [{"type": "function"}]}, "tools"), ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"), ({"n": 99}, "n"), ({"n": 0}, "n"), ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "messages"), ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"), ({"stream_options": {}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}, "response_format"),
        ({"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a"]}}, "guided_choice"),
        ({"guided_choice": ["a", "a"]}, "guided_choice"), ({"guided_choice": []}, "guided_choice"),
        ({"messages": []}, "messages"), ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0.colour"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [{"role": "user", "content": "long " * 500}]}, "messages"),
        ({"reasoning_effort": "high"}, "reasoning_effort"), ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"stop": [""]}, None), ({"seed": 2**70}, "seed"), ({"top_k": -2}, "top_k"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(served, change, param):
    response = served.client.post("/v1/chat/completions", json={**chat(), **change})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert served.backend.seen == []


def test_what_changes_nothing_is_taken(served):
    body = chat(user="u", metadata={"a": "b"}, store=True, presence_penalty=0, frequency_penalty=0.0, logit_bias=None,
                tools=[], tool_choice="none", best_of=1)  # fmt: skip
    assert served.client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("data", "told"),
    [(b'{"model": "base", "messages": [], "model": "other"}', "the key 'model' stands twice"),
     (b"{", "no JSON"), (b"\xff\xfe", "no JSON"), (b"[1]", "one JSON object"), (b"", "one JSON object"), (b"[" * 100_000, ""),
     (b'{"model": "left", "messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
     (b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}', "surrogate"),
     (b'{"model": "left", "\\ud800": 1}', "surrogate"), (b'{"model": "left", "temperature": NaN}', ""),
     (b'{"model": "left", "seed": ' + b"9" * 5000 + b"}", "")],
)  # fmt: skip
def test_bodies_that_are_no_requests(served, data, told):
    response = served.client.post("/v1/chat/completions", content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_the_engines_refusals_have_their_own_status(served):
    url = "/v1/chat/completions"
    served.backend.queue = 0
    for stream in (False, True):
        response = served.client.post(url, json=chat(stream=stream))
        assert response.status_code == 429
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["type"] == "rate_limit_error"
    served.backend.queue, served.backend.failed = 8, True
    assert served.client.post(url, json=chat()).status_code == 503
    assert served.client.post("/v1/classify", json={"model": "left", "documents": [{"text": "a"}]}).status_code == 503


def test_a_request_that_takes_too_long_ends_with_504(texts, tokenizer):
    backend = FakeBackend(tokenizer, pause_s=0.2)
    found = serving(texts, tokenizer, backend=backend, timeout_s=0.05)
    response = found.client.post("/v1/chat/completions", json=chat())
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"
    assert len(backend.cancelled) == 1
    backend.pause_s = 0.03
    response = found.client.post("/v1/chat/completions", json=chat(stream=True))
    assert response.status_code == 200
    last = response.text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert backend.running == 0


def test_paths_and_methods_that_do_not_exist(served):
    for method, path, status in (("GET", "/v2/x", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405),
                                 ("GET", "/v1/models/%00%ff", 404), ("GET", "/%2e%2e/etc", 404)):  # fmt: skip
        response = served.client.request(method, path)
        assert response.status_code == status, path
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
