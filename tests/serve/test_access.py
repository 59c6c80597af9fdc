"""Who may ask what: keys, tenants, limits, sizes, admin; nothing that tells a stranger what exists."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from lamella.cli import app as cli
from lamella.errors import UserError
from lamella.serve.errors import ApiError
from lamella.serve.keys import ANYONE, KeyStore, NewKey, add_key, read_keys, revoke_key
from lamella.serve.limits import Limiter
from lamella.serve.settings import KeyLimits, load_serve_config
from tests.serve.conftest import chat, serving
from tests.serve.fake import FakeBackend, write_adapter

URL = "/v1/chat/completions"


def test_a_key_reaches_its_own_adapters_alone(keyed):
    for name, models in (("left", ["left"]), ("right", ["base", "right"]), ("admin", [])):
        listed = keyed.client.get("/v1/models", headers=keyed.keys[name]).json()["data"]
        assert sorted(m["id"] for m in listed) == models
        for model in ("left", "right", "base"):
            wanted = 200 if model in models else 404
            assert keyed.client.post(URL, json=chat(model), headers=keyed.keys[name]).status_code == wanted
            assert keyed.client.get(f"/v1/models/{model}", headers=keyed.keys[name]).status_code == wanted


def test_another_tenants_model_looks_like_one_that_does_not_exist(keyed):
    for path, body in (
        (URL, chat()),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/classify", {"documents": [{"text": "a"}]}),
    ):
        answers = [
            keyed.client.post(path, json={**body, "model": m}, headers=keyed.keys["left"]) for m in ("right", "nevah")
        ]
        assert [a.status_code for a in answers] == [404, 404]
        assert answers[0].text.replace("right", "nevah") == answers[1].text
    assert "right" not in keyed.client.get("/openapi.json").text


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer x",
        "Basic {}",
        "bearer{}",
        "Bearer {}x",
        "Bearer lam-00000000-" + "a" * 43,
        "Bearer é",
    ],
)
def test_without_a_right_key_nothing_is_answered(keyed, header):
    key = keyed.secrets["left"]
    headers = {} if header is None else {"Authorization": header.format(key).encode("latin-1")}
    for method, path in (
        ("POST", URL),
        ("GET", "/v1/models"),
        ("POST", "/admin/adapters"),
        ("GET", "/metrics"),
        ("GET", "/x"),
    ):
        response = keyed.client.request(method, path, headers=headers, json=chat() if method == "POST" else None)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    assert keyed.client.get("/health").status_code == 200
    assert keyed.backend.seen == []


def test_keys_are_hashes_at_rest_and_never_told(keyed, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    stored = keyed.path.read_text()
    assert oct(keyed.path.stat().st_mode & 0o777) == "0o600"
    told = stored
    for name, headers in keyed.keys.items():
        for path in ("/v1/models", "/metrics", "/admin/adapters"):
            told += keyed.client.get(path, headers=headers).text
        told += keyed.client.post(URL, json=chat("nevah"), headers=headers).text
        told += keyed.client.post(URL, json=chat(tempature=1), headers=headers).text
        assert name in stored
    out, err = capfd.readouterr()
    told += caplog.text + out + err
    for key in keyed.secrets.values():
        assert key not in told
        assert key.split("-", 2)[2] not in told


def test_revoking_and_adding_count_at_once(keyed):
    revoke_key(keyed.path, "left")
    assert keyed.client.post(URL, json=chat(), headers=keyed.keys["left"]).status_code == 401
    _, key = add_key(keyed.path, NewKey("left", ("*",)))
    headers = {"Authorization": f"Bearer {key}"}
    assert keyed.client.post(URL, json=chat("right"), headers=headers).status_code == 200
    assert keyed.client.post(URL, json=chat("base"), headers=headers).status_code == 404
    keyed.path.write_text("{")
    assert keyed.client.post(URL, json=chat(), headers=headers).status_code == 503


def test_keys_made_at_the_same_time_are_all_kept(tmp_path):
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_key(path, NewKey(f"k{n}", base=True)), range(16)))
    assert len(read_keys(path).keys) == 16


def test_a_key_needs_a_name_of_its_own_and_something_to_reach(tmp_path):
    path = tmp_path / "keys.json"
    with pytest.raises(UserError, match="reach nothing"):
        add_key(path, NewKey("a"))
    add_key(path, NewKey("a", base=True))
    with pytest.raises(UserError, match="exists"):
        add_key(path, NewKey("a", base=True))
    with pytest.raises(UserError, match="no key 'b'"):
        revoke_key(path, "b")
    for use in (KeyStore, lambda none: revoke_key(none, "a")):
        with pytest.raises(UserError, match="keys add"):
            use(tmp_path / "none.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".keys.json.lock", "keys.json"]


def test_the_commands_of_keys(tmp_path):
    file = ["--keys", str(tmp_path / "keys.json")]
    made = CliRunner().invoke(
        cli, ["serve", "keys", "add", "foods", "--adapter", "foods", "--concurrent", "2", "--json", *file]
    )
    key = json.loads(made.stdout)["key"]
    assert KeyStore(tmp_path / "keys.json").caller(key).limits == KeyLimits(concurrent=2)
    listed = CliRunner().invoke(cli, ["serve", "keys", "list", "--json", *file]).stdout
    assert json.loads(listed)["keys"][0]["adapters"] == ["foods"]
    assert key not in listed and "hash" not in listed
    assert "foods" in CliRunner().invoke(cli, ["serve", "keys", "list", *file]).stdout
    assert CliRunner().invoke(cli, ["serve", "keys", "revoke", "foods", *file]).exit_code == 0
    assert KeyStore(tmp_path / "keys.json").caller(key) is None


# ---- limits -----------------------------------------------------------------------------------------


def test_limits_of_a_key():
    now = [0.0]
    limiter = Limiter(KeyLimits(requests_per_minute=2, tokens_per_minute=60, concurrent=1), lambda: now[0])
    with limiter.request(ANYONE):
        with pytest.raises(ApiError, match="running") as error, limiter.request(ANYONE):
            pass
        assert error.value.status == 429
        limiter.count(ANYONE, 100)
    with pytest.raises(ApiError, match="tokens a minute") as error, limiter.request(ANYONE):
        pass
    assert error.value.headers["Retry-After"] == "42"  # 41 tokens short, one a second
    now[0] = 41.5
    with limiter.request(ANYONE):
        pass
    with limiter.request(ANYONE):
        pass
    with pytest.raises(ApiError, match="requests a minute"), limiter.request(ANYONE):
        pass


def test_limits_answer_429(texts, tokenizer):
    found = serving(texts, tokenizer, per_key={"requests_per_minute": 2})
    assert [found.client.post(URL, json=chat()).status_code for _ in range(3)] == [200, 200, 429]
    response = found.client.post(URL, json=chat())
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "requests_per_minute"
    assert found.client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_requests_that_are_too_large(texts, tokenizer, chunked):
    found = serving(texts, tokenizer, max_request_bytes="1kB")
    body = json.dumps(chat(text="x" * 2000)).encode()
    pieces = (body[i : i + 100] for i in range(0, len(body), 100))
    response = found.client.post(URL, content=pieces if chunked else body, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_lengths_that_are_none(served):
    for value in ("-1", "x", "9" * 400, "1e3"):
        response = served.client.post(URL, content=b"{}", headers={"Content-Length": value})
        assert response.status_code in (400, 413)


# ---- admin and metrics ------------------------------------------------------------------------------


def test_adapters_come_and_go(keyed, tmp_path):
    client, admin = keyed.client, keyed.keys["admin"]
    for name in ("left", "right", "watch"):
        assert client.get("/admin/adapters", headers=keyed.keys[name]).status_code == 403
        assert client.delete("/admin/adapters/left", headers=keyed.keys[name]).status_code == 403
    folder = write_adapter(tmp_path / "new", "novelty")
    body = {"name": "left", "path": str(folder)}
    assert client.post("/admin/adapters", json=body, headers=admin).status_code == 409
    made = client.post("/admin/adapters", json={**body, "replace": True}, headers=admin)
    assert made.status_code == 201
    answer = client.post(URL, json=chat(), headers=keyed.keys["left"]).json()
    assert answer["choices"][0]["message"]["content"] == "novelty"
    assert keyed.backend.unloaded == ["left"]
    assert client.delete("/admin/adapters/left", headers=admin).json() == {
        "name": "left",
        "deleted": True,
        "in_flight": 0,
    }
    assert client.post(URL, json=chat(), headers=keyed.keys["left"]).status_code == 404
    assert set(keyed.backend.adapters()) == {"right"}
    assert client.delete("/admin/adapters/left", headers=admin).status_code == 404
    assert client.delete("/admin/adapters/base", headers=admin).status_code == 404


@pytest.mark.parametrize(
    ("change", "told"),
    [({"path": "none"}, "no such adapter folder"), ({"path": "x" * 3000}, "no such adapter folder"),
     ({"name": "base"}, "served already"), ({"name": "a/b"}, "name"),
     ({"path": "a\0b"}, "NUL"),
     ({"tenant": "left"}, "without `task`"), ({"task": "none.toml"}, "no such file"), ({"path": "EMPTY"}, "0 of 4 modules")],
)  # fmt: skip
def test_adapters_that_cannot_be_loaded_change_nothing(keyed, texts, tmp_path, change, told):
    body = {"name": "third", "path": str(texts / "left"), **change}
    body["path"] = str(tmp_path) if body["path"] == "EMPTY" else body["path"]
    response = keyed.client.post("/admin/adapters", json=body, headers=keyed.keys["admin"])
    assert response.status_code in (400, 409)
    assert told in response.json()["error"]["message"]
    assert set(keyed.registry.models) == {"base", "left", "right"}
    assert set(keyed.backend.adapters()) == {"left", "right"}


def test_without_keys_nobody_is_admin(served):
    assert served.client.get("/admin/adapters").status_code == 403


def test_metrics(keyed):
    client = keyed.client
    assert client.get("/metrics", headers=keyed.keys["left"]).status_code == 403
    client.post(URL, json=chat(), headers=keyed.keys["left"])
    client.post(URL, json=chat("secret-tenant"), headers=keyed.keys["left"])
    text = client.get("/metrics", headers=keyed.keys["watch"]).text
    assert 'lamella_requests_total{model="left",route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'lamella_requests_total{model="",route="/v1/chat/completions",status="404"} 1.0' in text
    assert "secret-tenant" not in text
    written = len(keyed.backend.ids("street name é"))
    assert f'lamella_tokens_total{{kind="completion",model="left"}} {float(written)}' in text
    assert 'lamella_decode_steps_total{rows="2"} 5.0' in text
    for name in ("lamella_running", "lamella_queue", "lamella_kv_tokens_used", "lamella_adapters 2.0",
                 'lamella_first_token_seconds_count{model="left"} 1.0'):  # fmt: skip
        assert name in text


def test_health(served):
    assert served.client.get("/health").json() == {"live": True, "ready": True}
    served.backend.failed = True
    assert served.client.get("/health").status_code == 503
    served.backend.failed = False
    served.service.stopping = lambda: True
    assert served.client.get("/health/ready").status_code == 503
    assert served.client.get("/health/live").status_code == 200
    response = served.client.post(URL, json=chat())
    assert response.status_code == 503
    assert "retry-after" in response.headers


# ---- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [('host = "0.0.0.0"', "no keys"), ('prot = 1', "nearest valid name: `port`"), ("[[adapters]]\nname='base'\npath='x'", "two models"),
     ("[[adapters]]\nname='a'\npath='x'\n[[adapters]]\nname='a'\npath='x'", "two models"), ("[engine]\nkv_cache='many'", "not a size"),
     ("port = 70000", "65535"), ("adapters = 1", "adapters")],
)  # fmt: skip
def test_settings_that_cannot_be(tmp_path, text, told):
    path = tmp_path / "serve.toml"
    path.write_text(f'store = "s"\n{text}\n')
    with pytest.raises(UserError, match=told):
        load_serve_config(path)


def test_paths_are_relative_to_the_file(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text(
        'store = "s"\nkeys = "k.json"\nhost = "0.0.0.0"\n[[adapters]]\nname = "a"\npath = "runs/a"\ntask = "t.toml"\n'
    )
    config = load_serve_config(path, {"port": 9})
    assert (config.store, config.keys, config.port) == (tmp_path / "s", tmp_path / "k.json", 9)
    assert (config.adapters[0].path, config.adapters[0].task) == (tmp_path / "runs/a", tmp_path / "t.toml")


def test_a_request_keeps_the_adapter_that_it_began_with(texts, tokenizer, tmp_path):
    found = serving(texts, tokenizer, backend=FakeBackend(tokenizer))
    model = found.registry.models["left"]
    with found.registry.lease(model):
        found.registry.add("left", write_adapter(tmp_path / "new", "other"), replace=True)
        assert found.backend.unloaded == []
        assert found.registry.remove("right") == 0
        assert found.backend.unloaded == ["right"]
    assert found.backend.unloaded == ["right", "left"]
    with pytest.raises(KeyError), found.registry.lease(model):
        pass


@pytest.mark.parametrize("change", ["last", "first", "other tenant's"])
def test_a_known_id_with_another_secret_is_nobody(keyed, change):
    """The secret decides, not the id that the file can be searched by."""
    key, other = keyed.secrets["left"], keyed.secrets["right"]
    start, secret = key[:13], key[13:]
    wrong = {"last": secret[:-1] + ("A" if secret[-1] != "A" else "B"), "first": ("A" if secret[0] != "A" else "B") + secret[1:],
             "other tenant's": other[13:]}[change]  # fmt: skip
    assert start.startswith("lam-") and start.endswith("-") and len(wrong) == 43
    answer = keyed.client.post(URL, json=chat(), headers={"Authorization": f"Bearer {start}{wrong}"})
    assert answer.status_code == 401 and keyed.backend.seen == []
    assert keyed.client.post(URL, json=chat(), headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_a_key_file_that_others_may_write_is_refused(tmp_path, mode):
    path = tmp_path / "keys.json"
    add_key(path, NewKey("t", base=True))
    assert KeyStore(path)
    path.chmod(mode)
    with pytest.raises(UserError, match="others may write") as caught:
        KeyStore(path)
    assert "chmod 600" in caught.value.fix


@pytest.mark.parametrize("record", [NewKey("", base=True), NewKey(" ", base=True), NewKey("t", adapters=("",))])
def test_a_key_without_a_name_is_refused(tmp_path, record):
    with pytest.raises(UserError, match="need names"):
        add_key(tmp_path / "keys.json", record)
    assert not (tmp_path / "keys.json").exists()
