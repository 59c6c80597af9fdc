"""The serving bench on a tiny store: its lines count what was written and scored."""

import json
import sys

from bench import serve
from lamella.engine import Engine
from tests.fixtures import dense_config
from tests.serve.tenants import save_adapters


def test_lines_of_decoding_and_scoring(made, tmp_path, monkeypatch, capsys):
    store, _ = made(dense_config())
    folder = save_adapters(Engine.open(store, dtype="fp32"), tmp_path, 1)["t0"]
    asked = ["--store", str(store.path), "--adapter", str(folder), "--tenants", "2", "--rows", "1,3", "--prompt-tokens", "8",
             "--new-tokens", "4", "--scores", "6", "--dtype", "fp32", "--kv-cache", "1MiB"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench.serve", *asked])
    serve.main()
    one, three, scored = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(x["rows"], x["tenants"], x["walks"] >= 4) for x in (one, three)] == [(1, 1, True), (3, 2, True)]
    assert (scored["kind"], scored["requests"], scored["tenants"]) == ("score", 6, 2)
    assert min(x["tokens_per_s"] for x in (one, three)) > 0 < scored["requests_per_s"]
