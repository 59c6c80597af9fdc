"""A hub repository described through byte ranges, against a server of our own that counts what it serves."""

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lamella.checkpoint.architecture import tensor_shapes
from lamella.forecast.describe import shape_of
from tests.checkpoint.families import tiny
from tests.forecast.headers import write_headers

RESOLVE = re.compile(r"^/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)$")
SCRIPT = """
import json, sys
from lamella.errors import UserError
from lamella.forecast.describe import shape_of
out = {}
for model in sys.argv[1:]:
    try:
        shape = shape_of(model)
        out[model] = [shape.source, shape.total_parameters, shape.checkpoint_bytes, shape.store_bytes, list(shape.notes)]
    except UserError as error:
        out[model] = str(error)
print(json.dumps(out))
"""


class Hub(BaseHTTPRequestHandler):
    """Files of `root/owner/name`, as the hub serves them: whole or a range."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, body):
        match = RESOLVE.match(self.path.partition("?")[0])
        folder = self.server.root / match["repo"] if match else None
        if folder is None or not folder.is_dir():
            return self._refuse(404 if match is None or match["repo"] != "some/gated" else 403,
                                "RepoNotFound" if match is None or match["repo"] != "some/gated" else "GatedRepo")  # fmt: skip
        file = folder / match["file"]
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        size = file.stat().st_size
        start, end = 0, size - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked:
            start, end = int(asked[1]), min(int(asked[2]), size - 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end + 1 - start))
        self.send_header("ETag", f'"{file.name}-{size}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if body:
            with file.open("rb") as stream:
                stream.seek(start)
                self.wfile.write(stream.read(end + 1 - start))
            with self.server.lock:
                self.server.served[match["repo"]] += end + 1 - start


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.root, server.served, server.lock = tmp_path_factory.mktemp("hub"), Counter(), threading.Lock()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def describe(hub, home, *models, **env):
    address = f"http://127.0.0.1:{hub.server_address[1]}"
    env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **env}
    done = subprocess.run([sys.executable, "-c", SCRIPT, *models], env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_headers_alone_are_read(hub, tmp_path):
    config = json.loads(tiny("qwen3_moe", hidden_size=512, intermediate_size=2048).to_json_string(use_diff=False))
    tensors = {n: ("BF16", s) for n, s in tensor_shapes(config).items()}
    folders = {name: write_headers(hub.root / "some" / name, config, tensors, shards)
               for name, shards in (("sharded", 3), ("single", 1))}  # fmt: skip
    bare = hub.root / "some" / "bare"
    bare.mkdir(parents=True)
    (bare / "config.json").write_text(json.dumps(config))
    (hub.root / "some" / "empty").mkdir()
    (bare.parent / "odd").mkdir()
    (bare.parent / "odd" / "config.json").write_text("{")
    names = [f"some/{n}" for n in ("sharded", "single", "bare", "empty", "odd", "gated", "nowhere")]
    found = describe(hub, tmp_path / "home", *names)
    local = shape_of(folders["single"])
    for name in ("some/sharded", "some/single"):
        assert found[name][:4] == ["headers", local.total_parameters, local.checkpoint_bytes, local.store_bytes]
        assert hub.served[name] < 0.02 * local.checkpoint_bytes + 3 * 100_001 + 60_000
        assert hub.served[name] < local.checkpoint_bytes / 4
    assert found["some/bare"][:2] == ["config.json", local.total_parameters]
    assert "no safetensors" in found["some/bare"][4][0]
    assert "lacks a file" in found["some/empty"]
    assert "not valid JSON" in found["some/odd"]
    assert "gated" in found["some/gated"] and "hf auth login" in found["some/gated"]
    assert "no hub repository" in found["some/nowhere"]


def test_without_a_network_it_is_told(hub, tmp_path):
    offline = describe(hub, tmp_path, "some/model", HF_HUB_OFFLINE="1")["some/model"]
    refused = describe(hub, tmp_path, "some/model", HF_ENDPOINT="http://127.0.0.1:9")["some/model"]
    for message in (offline, refused):
        assert "cannot be reached" in message and "config.json" in message


def test_a_plan_of_a_hub_id_is_that_of_the_folder(hub, tmp_path):
    config = json.loads(tiny("qwen3_moe", hidden_size=512, intermediate_size=2048).to_json_string(use_diff=False))
    folder = write_headers(
        hub.root / "some" / "planned", config, {n: ("BF16", s) for n, s in tensor_shapes(config).items()}, 2
    )
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}", "HF_HOME": str(tmp_path / "home"),
           "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
    asked = ["--machine", "1xRTX4090+ram=64GB", "--rows", "64", "--tokens", "200", "--json"]
    plans = []
    for model in ("some/planned", str(folder)):
        done = subprocess.run(
            [sys.executable, "-m", "lamella", "plan", model, *asked], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        plans.append(json.loads(done.stdout))
    remote, local = plans
    assert hub.served["some/planned"] < local["figures"]["model"]["checkpoint_bytes"] / 4
    assert remote["figures"] == local["figures"] and remote["fits"] == local["fits"]
    values = [{n["name"]: n["value"] for n in plan["numbers"]} for plan in plans]
    different = {name for name in values[1] if values[0].get(name) != values[1][name]}
    assert not different and len(values[0]) == len(values[1]) > 60
