import json
import sys

import pytest

from lamella.errors import UserError
from lamella.loadtest.drive import Until
from lamella.loadtest.prompts import Models, made_up
from lamella.loadtest.run import Plan
from lamella.loadtest.tools import check, guidellm_command, guidellm_level, run_tool, vllm_command, vllm_level
from lamella.report.artifacts import sections_of

VLLM = {
    "duration": 4.0, "completed": 2, "failed": 2, "start_times": [1.0, 2.0, 3.0, 4.0], "latencies": [1.0, 0.5, 0.1, 0.1],
    "ttfts": [0.4, 0.5, 0.0, 0.0], "itls": [[0.2, 0.4], [], [], []], "output_lens": [3, 1, 0, 0],
    "errors": ["", "", "Too Many Requests", "Traceback ...\nConnectionError: gone\n"],
}  # fmt: skip


def shape(p50, mean, count):
    return {"successful": {"count": count, "mean": mean, "total_sum": mean * count,
                           "percentiles": {"p50": p50, "p90": p50 * 2, "p99": p50 * 3}}}  # fmt: skip


GUIDELLM = {
    "benchmarks": [
        {"duration": 10.0, "metrics": {
            "request_totals": {"successful": 40, "errored": 2, "incomplete": 1, "total": 43},
            "time_to_first_token_ms": shape(100.0, 120.0, 40), "inter_token_latency_ms": shape(20.0, 25.0, 40),
            "request_latency": shape(1.5, 1.6, 40), "prompt_token_count": shape(50, 50.0, 40),
            "output_token_count": shape(10, 10.0, 40)}}
    ]
}  # fmt: skip


def plan(**of):
    return Plan(
        "http://h:8000/v1", "chat", of.pop("levels", (8,)), of.pop("rate", None), of.pop("until", Until(30)), **of
    )


def test_every_request_of_vllm_counts():
    level = vllm_level(VLLM, plan(targets={"e2e": 0.6}))
    assert level["requests"] == {"sent": 4, "ok": 2, "rejected": 1, "errors": 1}
    assert level["errors"] == [{"said": "ConnectionError: gone", "count": 1}]
    assert level["tpot_s"]["mean"] == pytest.approx(0.3) and level["tpot_s"]["samples"] == 1
    assert level["ttft_s"]["mean"] == pytest.approx(0.45) and level["tokens"]["output"] == 4
    assert level["throughput"] == {"requests_per_s": 0.5, "output_tokens_per_s": 1.0, "labels_per_s": None}
    assert level["goodput"]["share"] == 0.25
    for broken in ({**VLLM, "completed": 3}, {**VLLM, "ttfts": [1.0]}, {"duration": 1.0}):
        with pytest.raises(UserError):
            vllm_level(broken, plan())


def test_guidellm_in_seconds():
    level = guidellm_level(GUIDELLM)
    assert level["requests"] == {"sent": 42, "ok": 40, "rejected": 0, "errors": 2}
    assert level["ttft_s"]["p50"] == pytest.approx(0.1) and level["e2e_s"]["p99"] == pytest.approx(4.5)
    assert level["tpot_s"]["mean"] == pytest.approx(0.025) and level["e2e_s"]["few_for_p99"]
    assert level["throughput"]["requests_per_s"] == 4 and level["tokens"]["output"] == 400
    assert any("1 requests were cut off" in n for n in level["notes"])
    for broken in ({"benchmarks": []}, {"benchmarks": [{"duration": 1.0, "metrics": {}}]}, {}):
        with pytest.raises(UserError):
            guidellm_level(broken)


def test_commands(tmp_path):
    words = " ".join(vllm_command(plan(warmup=3), "m", 8, tmp_path))
    assert "--base-url http://h:8000 --endpoint /v1/chat/completions --model m" in words
    assert "--max-concurrency 8" in words and "--num-prompts 30" in words and "--num-warmups 3" in words
    assert "--request-rate 2.5" in " ".join(vllm_command(plan(levels=(), rate=2.5), "m", None, tmp_path))
    words = guidellm_command(plan(levels=(), rate=2.5, until=Until(None, 9.0)), "m", None, tmp_path)
    assert json.loads(words[words.index("--profile") + 1]) == {"kind": "poisson", "rate": [2.5]}
    assert json.loads(words[words.index("--constraint") + 1]) == {"kind": "max_duration", "seconds": 9.0}


@pytest.mark.parametrize(
    ("tool", "of", "models"),
    [
        ("vllm", {}, Models(("a", "b"), {})),
        ("vllm", {"until": Until(None, 3.0)}, Models(("a",), {})),
        ("vllm", {"targets": {"label": 1.0}}, Models(("a",), {})),
        ("guidellm", {"warmup": 2}, Models(("a",), {})),
        ("guidellm", {"key_env": "K"}, Models(("a",), {})),
    ],
)
def test_what_a_program_cannot_do_is_refused(tool, of, models):
    with pytest.raises(UserError):
        check(tool, plan(**of), models)


def script(folder, body):
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(0o755)


def test_a_program_is_run_with_its_key_in_the_environment_alone(tmp_path, monkeypatch):
    key = "sk-very-secret-key"
    monkeypatch.setenv("A_KEY", key)
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin", f"""import os, sys
args = sys.argv
assert os.environ["OPENAI_API_KEY"] == {key!r} and {key!r} not in args
rows = open(args[args.index("--dataset-path") + 1]).read().splitlines()
assert len(rows) == 1000 and '"prompt"' in rows[0]
open(args[args.index("--result-dir") + 1] + "/result.json", "w").write({json.dumps(VLLM)!r})
""")  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    file = tmp_path / "loadtest.json"
    tree = run_tool("vllm", plan(key_env="A_KEY", levels=(1, 2)), Models(("m",), {}), made_up("5", 0), file)
    assert tree["tool"] == "vllm" and [level["concurrency"] for level in tree["levels"]] == [1, 2]
    assert key not in file.read_text() and "not as expected" not in str(sections_of(tmp_path))
    script(tmp_path / "bin", 'import os; print("bad key", os.environ["OPENAI_API_KEY"]); raise SystemExit(3)')
    with pytest.raises(UserError, match=r"code 3 and no result: bad key \*\*\*"):
        run_tool("vllm", plan(key_env="A_KEY"), Models(("m",), {}), made_up("5", 0), file)
    with pytest.raises(UserError, match="not installed"):
        run_tool("guidellm", plan(), Models(("m",), {}), made_up("5", 0), file)
