"""Whatever is sent, nothing is answered with 500, and errors have one shape."""

import json
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamella.serve.keys import NewKey, add_key
from tests.serve.conftest import serving

CHECKED = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def running(texts, tokenizer, tmp_path_factory):
    """The server, and a key that may do everything."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    _, key = add_key(path, NewKey("all", ("*",), base=True, admin=True))
    found = serving(texts, tokenizer, keys=path)
    found.key = {"Authorization": f"Bearer {key}"}
    return found


def check(response, sent):
    assert response.status_code < 500 or response.status_code in (503, 504), (response.status_code, response.text, sent)
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def fuzz(running, examples):
    """Requests by the schema and against it, with a model that exists; returns (path, status) of the former."""
    seen = set()

    def ask(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "left"
        response = case.call(headers=running.key)
        check(response, case.as_curl_command())
        return case.path, response.status_code

    def fuzz_one(cases, by_schema):
        @settings(CHECKED, max_examples=examples)
        @given(case=cases)
        def sent(case):
            found = ask(case)
            if by_schema:
                seen.add(found)

        sent()

    schema = schemathesis.openapi.from_asgi("/openapi.json", running.app)
    for operation in schema.get_all_operations():
        api = operation.ok()
        fuzz_one(api.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE), True)
        if api.body:
            fuzz_one(api.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE), False)
    return seen


def test_a_few_requests_of_its_own_schema(running):
    seen = fuzz(running, 12)
    assert len({path for path, _ in seen}) == 11
    assert {path for path, status in seen if status == 200} >= {
        "/v1/models",
        "/v1/classify",
        "/metrics",
        "/admin/adapters",
    }


@pytest.mark.serve
def test_many_requests_of_its_own_schema(running):
    seen = fuzz(running, 400)
    assert {path for path, status in seen if status == 200} >= {
        "/v1/classify",
        "/v1/completions",
        "/v1/chat/completions",
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6,
)  # fmt: skip
FIELDS = st.sampled_from(
    ["messages", "prompt", "documents", "max_tokens", "n", "stop", "temperature", "top_p", "top_k", "seed", "stream", "logprobs",
     "top_logprobs", "echo", "response_format", "guided_choice", "structured_outputs", "stream_options", "mode", "tools", "logit_bias"]
)  # fmt: skip


@settings(CHECKED, max_examples=60)
@given(
    path=st.sampled_from(["chat/completions", "completions", "classify"]),
    changed=st.dictionaries(FIELDS, JSON, max_size=3),
)
def test_right_requests_with_odd_values(running, path, changed):
    body = {"chat/completions": {"messages": [{"role": "user", "content": "a"}]}, "completions": {"prompt": "a"},
            "classify": {"documents": [{"text": "a"}]}}[path]  # fmt: skip
    sent = json.dumps({"model": "left", "max_tokens": 2} | body | changed)
    check(
        running.client.post(f"/v1/{path}", content=sent, headers=running.key | {"Content-Type": "application/json"}),
        sent,
    )


@settings(CHECKED, max_examples=60)
@given(
    path=st.text(max_size=30),
    name=st.text("abcXYZ-_09", min_size=1, max_size=10),
    value=st.binary(max_size=30),
    data=st.binary(max_size=40),
)
def test_odd_paths_headers_and_bodies(running, path, name, value, data):
    clean = bytes(b for b in value if b >= 32 and b != 127)
    url = "/v1/models/" + quote(path.encode("utf-8", "replace"))
    check(running.client.get(url, headers={name.encode(): clean, b"authorization": clean}), url)
    check(
        running.client.get(
            url, headers={name.encode(): clean, b"Authorization": running.key["Authorization"].encode()}
        ),
        url,
    )
    headers = running.key | {"content-type": clean, "accept": clean}
    check(running.client.post("/v1/completions", content=data, headers=headers), data)
