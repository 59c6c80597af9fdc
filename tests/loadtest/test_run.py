import asyncio
import json

import httpx
import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.errors import UserError
from lamella.eval.labels import LabelParser
from lamella.loadtest.drive import Until
from lamella.loadtest.prompts import Models, Prompt, in_turn, made_up, of_jsonl, read_models
from lamella.loadtest.run import Plan, base_of, run, the_only_model
from lamella.loadtest.settings import read_levels, read_prompts
from lamella.loadtest.table import show
from lamella.report.artifacts import sections_of

KEY = "sk-very-secret-key"
LABELS = ("pos", "neg")


def event(text="", reasoning="", finish=None):
    return {"choices": [{"delta": {"content": text, "reasoning_content": reasoning}, "finish_reason": finish}]}


COUNTS = {"prompt_tokens": 7, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 1}}
USAGE = {"choices": [], "usage": COUNTS}
ANSWERS = {
    "good": [event(reasoning="hm"), event("po"), event("s", finish="stop"), USAGE],
    "thinks": [event("<think>so long"), event(" and on", finish="length"), USAGE],
    "chats": [event("it is pos"), event(finish="stop"), USAGE],
    "cut": [event("po")],
}


class Fake:
    """A server whose answer depends on the text asked."""

    def __init__(self):
        self.bodies = []

    async def __call__(self, request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "only"}]})
        body = json.loads(request.content)
        self.bodies.append((request.url.path, body, request.headers.get("authorization")))
        if request.url.path == "/v1/classify":
            label = body["documents"][0]["text"]
            return httpx.Response(
                200, json={"labels": LABELS, "results": [{"label": label}], "usage": {"prompt_tokens": 5}}
            )
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if text == "full":
            return httpx.Response(429, json={"error": {"message": "busy"}}, headers={"Retry-After": "60"})
        if text == "broken":
            return httpx.Response(500, json={"error": {"message": f"no luck with {KEY}"}})
        lines = [f"data: {json.dumps(e)}\n\n" for e in ANSWERS[text]] + ["data: [DONE]\n\n"] * (text != "cut")
        return httpx.Response(200, text="".join(lines), headers={"content-type": "text/event-stream"})


def prompt(text, tenant=""):
    return Prompt(
        ({"role": "user", "content": text},), {"text": text, "entity": ""}, tenant, LabelParser(LABELS), LABELS
    )


def plan(mode="chat", levels=(2,), **of):
    return Plan("http://here/v1", mode, levels, of.pop("rate", None), of.pop("until", Until(12)), **of)


def test_statuses_are_counted_apart_and_the_key_stays_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)
    fake = Fake()
    prompts = [prompt(t) for t in ("good", "thinks", "chats", "cut", "full", "broken")]
    file = tmp_path / "loadtest.json"
    tree = run(plan(levels=(1, 3), warmup=6, key_env="A_KEY", targets={"e2e": 60.0}), prompts, Models(("m",), {}), file,
               httpx.MockTransport(fake))  # fmt: skip
    assert len(fake.bodies) == 2 * (6 + 12) and all(auth == f"Bearer {KEY}" for *_, auth in fake.bodies)
    assert [level["concurrency"] for level in tree["levels"]] == [1, 3] and tree["concurrency"] == 3
    for level in tree["levels"]:
        assert level["requests"] == {"sent": 12, "ok": 6, "rejected": 2, "errors": 4}
        assert level["labels"] == {"completed": 2, "truncated": 2, "invalid": 2}
        assert level["tokens"] == {"input": 42, "output": 18, "reasoning": 6}
        assert level["goodput"]["share"] == 0.5
        assert {e["said"] for e in level["errors"]} == {"the stream broke off", "no luck with *** (HTTP 500)"}
        assert any("6 warm-up requests" in n for n in level["notes"]) and any("p99" in n for n in level["notes"])
    assert KEY not in file.read_text() and json.loads(file.read_text()) == tree
    [section] = sections_of(tmp_path)
    assert "not as expected" not in str(section) and "12 sent, 6 answered" in str(section)
    assert show(tree).row_count == 14


def test_classify_has_no_tokens_and_counts_only_real_labels(tmp_path):
    fake = Fake()
    tree = run(plan("classify"), [prompt("pos"), prompt("nonsense")], Models(("m",), {}), tmp_path / "loadtest.json",
               httpx.MockTransport(fake))  # fmt: skip
    assert tree["labels"] == {"completed": 6, "truncated": 0, "invalid": 6}
    assert tree["ttft_s"] is tree["tpot_s"] is None and tree["label_s"]["samples"] == 6
    assert fake.bodies[0][1] == {"model": "m", "documents": [{"text": "pos"}]}
    assert "not as expected" not in str(sections_of(tmp_path))


def test_open_loop_through_the_client(tmp_path):
    tree = run(plan(levels=(), rate=2000.0, until=Until(20)), [prompt("good")], Models(("m",), {}),
               tmp_path / "loadtest.json", httpx.MockTransport(Fake()))  # fmt: skip
    assert (tree["rate"], tree["concurrency"], tree["requests"]["ok"]) == (2000.0, None, 20)
    assert any("was due" in n for n in tree["notes"])


def test_a_server_that_answers_nothing_writes_nothing(tmp_path):
    with pytest.raises(UserError, match="none of 12 requests was answered"):
        run(plan(), [prompt("broken")], Models(("m",), {}), tmp_path / "loadtest.json", httpx.MockTransport(Fake()))
    assert not list(tmp_path.iterdir())


def test_an_answer_that_never_comes_is_an_error(tmp_path):
    async def slow(request):
        await asyncio.sleep(30)

    with pytest.raises(UserError, match="no answer in time"):
        run(plan(until=Until(2), timeout_s=0.01), [prompt("good")], Models(("m",), {}), tmp_path / "x.json",
            httpx.MockTransport(slow))  # fmt: skip


def test_models_in_turn_and_by_tenant():
    prompts = in_turn([[prompt("a", "x"), prompt("b", "x")], [prompt("c", "y")]])
    assert [p.document["text"] for p in prompts] == ["a", "c", "b"]
    models = read_models(["x=one", "p", "q"], prompts)
    assert [models.of(prompts[0], 5), models.of(prompts[1], 0), models.of(prompts[1], 1)] == ["one", "p", "q"]
    for bad in (["x=one"], ["z=one"], ["x=one", "x=two", "p"], ["x="]):
        with pytest.raises(UserError):
            read_models(bad, prompts)


def test_the_only_model_and_addresses():
    assert the_only_model(plan(), httpx.MockTransport(Fake())) == "only"
    assert base_of("http://h:8000") == base_of("http://h:8000/") == base_of("http://h:8000/v1/") == "http://h:8000/v1"
    for bad in ("h:8000", "ftp://h", "http://name:word@h/v1", "http://h/v1?key=1"):
        with pytest.raises(UserError):
            base_of(bad)


def test_prompts_from_files(tmp_path):
    rows = [{"tenant": "a", "text": f"t{n}", "label": LABELS[n % 2]} for n in range(4)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.toml").write_text('name = "t"\ntest = "test.jsonl"\nprompt = "{text}?"\nmax_new_tokens = 9\n')
    prompts, most = read_prompts(tmp_path / "task.toml", None, None, 0)
    assert (len(prompts), most, prompts[0].messages[-1]["content"]) == (4, 9, "t0?")
    assert prompts[0].labels == ("neg", "pos")
    file = tmp_path / "p.jsonl"
    file.write_text('{"text": "one"}\n{"messages": [{"role": "user", "content": "two"}], "tenant": "b"}\n')
    assert [p.tenant for p in of_jsonl(file)] == ["", "b"]
    file.write_text('{"text": "one"}\n{"txet": "two"}\n')
    with pytest.raises(UserError) as told:
        of_jsonl(file)
    assert told.value.line == 2
    words = [len(p.document["text"].split()) for p in made_up("5-9", 3)]
    assert set(words) == set(range(5, 10)) and made_up("5-9", 3) == made_up("5-9", 3) != made_up("5-9", 4)
    for bad in ("0", "9-5", "x"):
        with pytest.raises(UserError):
            made_up(bad, 0)


def test_levels():
    assert (read_levels("1,8,32", None), read_levels(None, None), read_levels(None, 2.0)) == ((1, 8, 32), (1,), ())
    for bad in (("0", None), ("1,", None), ("2", 1.0), (None, -1.0), (None, float("nan"))):
        with pytest.raises(UserError):
            read_levels(*bad)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--target", "speed=1s"], "no such figure"),
        (["--mode", "classify", "--target", "ttft=1s"], "streams no tokens"),
        (["--target", "label=1s"], "have no labels"),
        (["--duration", "soon"], "no time above 0"),
        (["--concurrency", "2", "--rate", "1"], "--concurrency and --rate"),
    ],
)
def test_bad_options_are_told(options, told, tmp_path):
    result = CliRunner().invoke(app, ["loadtest", "http://127.0.0.1:9/v1", *options, "-o", str(tmp_path / "x.json")])
    assert isinstance(result.exception, UserError) and told in str(result.exception)
    assert not list(tmp_path.iterdir())
