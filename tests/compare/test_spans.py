"""Tasks of spans: reading answers, placing entities, scores by nervaluate, and a whole comparison."""

import json

import pytest

from lamella.compare.settings import load_compare
from lamella.compare.spans import Span, counts_of, f1_of, load_span_task, placed, read_answer
from lamella.errors import UserError
from tests.compare.test_compare import api, run, write
from tests.endpoint.fake import FakeServer

TEXT = "Ada met Bob in Paris; Bob left."


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('[{"label": "person", "text": "Ada"}]', 1), ("[]", 0), ('```json\n[{"label": "person", "start": 0, "end": 3}]\n```', 1),
        ('{"label": "person"}', None), ("Ada is a person", None), ('[{"label": "person"}]', None),
        ('[{"label": "p", "start": 3, "end": 3}]', None),
        ('[{"label": "p", "text": "a", "start": 0, "end": 1}]', None), ('[{"label": "p", "text": "Ada"}', None), ("", None), ("[1]", None),
    ],
)  # fmt: skip
def test_what_is_no_list_of_entities_is_no_answer(text, count):
    found = read_answer(text)
    assert found is None if count is None else len(json.loads(found)) == count


def test_words_are_placed_once_each_and_others_lie_beyond_the_text():
    spans = [
        Span(label="p", text="Bob"),
        Span(label="p", text="Bob"),
        Span(label="p", text="Bob"),
        Span(label="c", text="Rome"),
    ]
    found = placed(spans, TEXT)
    assert [(a, b) for _, a, b in found[:2]] == [(8, 11), (22, 25)]
    assert all(a > len(TEXT) for _, a, b in found[2:]) and len({a for _, a, _ in found}) == 4


@pytest.mark.parametrize(
    ("said", "strict", "exact", "partial", "kind"),
    [
        ([("p", 0, 3), ("c", 15, 20)], 1.0, 1.0, 1.0, 1.0),
        ([("p", 0, 3)], 2 / 3, 2 / 3, 2 / 3, 2 / 3),  # one missed
        ([("c", 0, 3), ("c", 15, 20)], 0.5, 1.0, 1.0, 0.5),  # a wrong type
        ([("p", 0, 7), ("c", 15, 20)], 0.5, 0.5, 0.75, 1.0),  # a border too far
        (
            [("p", 0, 3), ("c", 15, 20), ("zzz", 8, 11)],
            0.8,
            0.8,
            0.8,
            0.8,
        ),  # a label that is none is spurious, not dropped
        ([], 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_scores_by_hand(said, strict, exact, partial, kind):
    import numpy as np

    counts = counts_of([("p", 0, 3), ("c", 15, 20)], said)
    found = [float(f1_of(np.array(counts[s], dtype=float), s)) for s in ("strict", "exact", "partial", "ent_type")]
    assert found == pytest.approx([strict, exact, partial, kind])


def test_a_text_without_entities_and_an_answer_without_are_right():
    import numpy as np

    assert float(f1_of(np.array(counts_of([], [])["strict"], dtype=float), "strict")) == 1.0


@pytest.fixture
def folder(tmp_path):
    rows = []
    for tenant in ("news", "mail"):
        for k in range(8):
            name = ("Ada", "Bob", "Cleo", "Dan")[k % 4]
            spans = [
                {"label": "person", "text": name},
                {"label": "city", "start": len(f"{name} lives in "), "end": len(f"{name} lives in Paris")},
            ]
            rows.append({"tenant": tenant, "text": f"{name} lives in Paris, {tenant} {k}", "spans": spans})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "task.toml").write_text(
        'kind = "spans"\nname = "s"\ntest = "rows.jsonl"\nprompt = "{text} -> {labels}"\n'
    )
    return tmp_path


def answer(body):
    text = body["messages"][-1]["content"]
    name, number = text.split()[0], int(text.split(" -> ")[0].split()[-1])
    if number == 7:
        return "none that I see", "", "stop"
    if number == 6:
        return '[{"label": "person"', "", "length"
    found = [{"label": "person", "text": name}, {"label": "city", "text": "Paris"}]
    return json.dumps(found if number < 4 else found[:1]), "", "stop"


def test_a_comparison_of_spans(folder):
    config = write(folder, api(name="some"), api(name="all", temperature=0.5))
    some, everything = FakeServer(answer), FakeServer(lambda b: (answer({"messages": [{"content": b["messages"][-1]["content"].replace(
        b["messages"][-1]["content"].split(" -> ")[0].split()[-1], "0")}]})))  # fmt: skip

    class Both:
        transport = None

    import httpx

    async def route(request):
        chosen = everything if json.loads(request.content).get("temperature") else some
        return await chosen.transport.handle_async_request(request)

    Both.transport = httpx.MockTransport(route)
    tree = run(config, folder, Both)
    first, second = (c["metrics"] for c in tree["candidates"])
    # of 16 entities a tenant: 4 x 2 and 2 x 1 found, 6 missed, none spurious
    assert first["tenants"]["news"]["counts"]["strict"] == {
        "correct": 10,
        "incorrect": 0,
        "partial": 0,
        "missed": 6,
        "spurious": 0,
    }
    assert first["tenants"]["news"]["macro_f1"]["value"] == pytest.approx(20 / 26)
    assert (first["invalid"], first["truncated"]) == (2, 2) and second["average"]["value"] == 1.0
    low, high = (first["tenants"]["news"]["macro_f1"][k] for k in ("low", "high"))
    assert low < 20 / 26 < high
    d = tree["differences"][0]["tenants"]["mail"]
    assert d["value"] == pytest.approx(6 / 26) and d["low"] > 0 and d["significant"]
    assert any("invalid" in note for note in tree["candidates"][0]["notes"])
    from lamella.compare.table import show
    from lamella.report.artifacts import comparison

    show(tree)
    assert comparison(json.loads(json.dumps(tree)), "c", "c")["charts"][0]["groups"] == ["news", "mail", "average"]


def test_here_too(folder, tmp_path_factory):
    from lamella.compare.run import compare
    from tests.serve.tiny import make_tiny

    tiny = make_tiny(tmp_path_factory.mktemp("tiny"))
    write(
        folder,
        {
            "name": "tiny",
            "store": str(tiny.store),
            "answering": "generate",
            "max_new_tokens": 4,
            "dtype": "fp32",
            "threads": 1,
        },
    )
    tree = compare(load_compare(folder / "compare.toml"), folder / "out")
    assert tree["candidates"][0]["metrics"]["average"]["value"] == 0.0 and tree["candidates"][0]["tokens"]["output"] > 0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tenant": "t", "text": "Ada", "spans": [{"label": "p", "text": "Bob"}]}, "does not hold"),
        ({"tenant": "t", "text": "Ada", "spans": [{"label": "p", "start": 0, "end": 9}]}, "does not hold"),
        ({"tenant": "t", "text": "Ada", "spans": [{"label": "p"}]}, "give start and end, or text"),
        ({"tenant": "t", "text": "Ada", "span": []}, "nearest valid name: `spans`"),
    ],
)
def test_bad_rows_are_told_with_their_line(folder, row, said):
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(UserError) as caught:
        load_span_task(folder / "task.toml")
    assert said in str(caught.value) and caught.value.line == 17


def test_ways_of_answering_that_spans_do_not_have(folder):
    for candidate in ({"name": "b", "baseline": "tfidf"}, api(answering="constrained")):
        with pytest.raises(UserError, match="generate or think"):
            run(write(folder, candidate), folder, FakeServer(answer))


def test_two_rows_of_one_id_are_refused(folder):
    (folder / "more").mkdir()
    (folder / "more" / "rows.jsonl").write_text((folder / "rows.jsonl").read_text())
    text = (folder / "task.toml").read_text().replace('test = "rows.jsonl"', 'test = ["rows.jsonl", "more/rows.jsonl"]')
    (folder / "task.toml").write_text(text)
    with pytest.raises(UserError, match=r"two test rows of tenant 'news' have the id 'rows\.jsonl:1'"):
        load_span_task(folder / "task.toml")


@pytest.mark.parametrize("spans", [[("s", 0), ("t", "Ada")], [("t", "Ada"), ("s", 0)]])
def test_places_are_taken_before_words_are_looked_for(spans):
    made = [Span(label="p", start=0, end=3) if kind == "s" else Span(label="p", text="Ada") for kind, _ in spans]
    assert placed(made, "Ada Ada") == [("p", 0, 3), ("p", 4, 7)]


def test_a_place_that_the_text_does_not_have_is_spurious():
    (found,) = placed([Span(label="p", start=0, end=10**30)], TEXT)
    counts = counts_of([("p", 0, 3)], [found])
    assert all(counts[s] == [0, 0, 0, 1, 1] for s in ("strict", "exact", "partial", "ent_type"))


def test_no_answer_is_wrong_where_there_is_nothing_to_find_too(folder):
    rows = [{"tenant": "t", "text": f"nothing {k}", "spans": []} for k in range(8)] + [
        {"tenant": "t", "text": "Ada", "spans": [{"label": "p", "text": "Ada"}]}
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tree = run(write(folder, api()), folder, FakeServer(lambda b: ("I find nothing", "", "stop")))
    m = tree["candidates"][0]["metrics"]
    assert m["invalid"] == 9 and m["average"]["value"] == 0.0
    tree = run(write(folder, api(temperature=0.1)), folder, FakeServer(lambda b: ("[]", "", "stop")))
    assert tree["candidates"][0]["metrics"]["tenants"]["t"]["counts"]["strict"]["spurious"] == 0
