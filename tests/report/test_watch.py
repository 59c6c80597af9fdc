"""The live page's server."""

import json

import pytest
from starlette.testclient import TestClient

from lamella.report.watch import make_app
from tests.report import folders


@pytest.fixture
def runs(tmp_path):
    return folders.write_all(tmp_path, runs=3)


@pytest.fixture
def client(runs):
    return TestClient(make_app(runs), base_url="http://127.0.0.1:8080")


def test_runs_and_one_of_them(client):
    tree = client.get("/api/runs").json()
    assert [r["name"] for r in tree["runs"]] == ["run-000", "run-001", "run-002"]
    assert [r["status"] for r in tree["runs"]] == ["ok", "failed", "ok"]
    run = client.get("/api/runs/run-001").json()
    assert run["title"] == "run-001" and run["good"] is False
    assert client.get("/api/runs/run-001", params={"version": run["version"]}).status_code == 304
    assert [s["id"].split("-")[0] for s in client.get("/api/artifacts").json()] == ["compare", "loadtest", "decide"]
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html") and "connect-src 'self'" in page.text


def test_what_is_appended_is_seen(client, runs):
    before = client.get("/api/runs/run-000").json()["version"]
    (runs / "run-000" / "receipt.json").unlink()
    folders.write_lines(runs / "run-000" / "metrics.jsonl", [folders.line(401, 0.123)], "a")
    after = client.get("/api/runs/run-000").json()
    assert after["version"] != before and after["status"] == "running"
    listed = client.get("/api/runs").json()["runs"][0]
    assert listed["step"] == 401 and listed["loss"] == 0.123 and listed["status"] == "running"


def test_a_part_of_the_steps_comes_in_full(client, runs):
    folders.write_lines(runs / "run-000" / "metrics.jsonl", folders.metrics_lines(5000))
    whole = client.get("/api/runs/run-000/series").json()
    loss = next(c for c in whole if c["key"] == "loss")
    assert loss["thinned"] and len(loss["series"][0]["x"]) < 1300
    some = client.get("/api/runs/run-000/series", params={"first": 2000, "last": 2100}).json()
    loss = next(c for c in some if c["key"] == "loss")
    assert loss["series"][0]["x"] == list(range(2000, 2101)) and not loss["thinned"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1", ""])
def test_other_names_get_nothing(client, host):
    for path in ("/", "/api/runs", "/api/runs/run-000"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421 and "run-000" not in answer.text


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:8080"])
def test_this_machines_names_do(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


def test_a_name_that_was_allowed(runs):
    client = TestClient(make_app(runs, frozenset({"box.lan"})), base_url="http://box.lan:8080")
    assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize("name", ["..", "../secret", "%2e%2e%2fsecret", "nowhere", "run-000/../../secret", "%00"])
def test_nothing_outside_the_folder_is_read(client, runs, name):
    secret = runs.parent / "secret"
    secret.mkdir(exist_ok=True)
    (secret / "receipt.json").write_text(json.dumps({"status": "ok", "name": "hidden"}))
    for path in (f"/api/runs/{name}", f"/api/runs/{name}/series"):
        answer = client.get(path)
        assert answer.status_code == 404 and "hidden" not in answer.text


def test_a_broken_file_is_told_and_the_rest_is_served(client, runs):
    (runs / "run-001" / "receipt.json").write_text("{")
    answer = client.get("/api/runs/run-001")
    assert answer.status_code == 422 and "receipt.json" in answer.json()["error"]
    listed = client.get("/api/runs").json()["runs"]
    assert "not JSON" in listed[1]["note"] and listed[0]["status"] == "ok"


def test_a_list_of_many_long_runs_reads_their_ends_alone(tmp_path, monkeypatch):
    """What is read does not grow with the steps."""
    for k in range(20):
        folders.write_run(tmp_path / f"r{k}", 300, k, 1, load=False, f1=False)
    client = TestClient(make_app(tmp_path), base_url="http://localhost")
    read = []
    from lamella.report import collect

    monkeypatch.setattr(collect.Columns, "update", lambda self: read.append(self.path))
    assert len(client.get("/api/runs").json()["runs"]) == 20 and read == []
