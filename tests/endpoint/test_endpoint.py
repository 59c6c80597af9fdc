"""Client, limits, cache and prices."""

import asyncio
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.endpoint.cache import AnswerCache, key_of
from lamella.endpoint.client import FIRST_WAIT_S, LONGEST_WAIT_S, Endpoint, Refused, back_off_s
from lamella.endpoint.limits import CeilingReached, Ledger, RateLimiter
from lamella.endpoint.prices import GivenPrice, price_of
from lamella.errors import UserError
from tests.endpoint.fake import FakeServer, broken, error

KEY = "sk-very-secret-0123456789"


def ask(server, body=None, attempts=4, key_env=None, waits=None):
    async def sleep(seconds):
        (waits if waits is not None else []).append(seconds)

    async def run():
        async with Endpoint(
            "http://test/v1", transport=server.transport, attempts=attempts, key_env=key_env, sleep=sleep
        ) as e:
            return await e.chat(body or {"model": "m", "messages": []})

    return asyncio.run(run())


def test_an_answer_with_its_tokens():
    reply = ask(FakeServer(lambda b: ("yes", "hm", "stop"), tokens=(12, 5, 3)))
    assert (reply.text, reply.reasoning, reply.finish, reply.retries) == ("yes", "hm", "stop", 0)
    assert (reply.usage.input, reply.usage.output, reply.usage.reasoning) == (12, 5, 3)


@pytest.mark.parametrize("failed", [error(429), error(500), error(503), broken(), error(408)])
def test_what_may_pass_is_asked_again(failed):
    server, waits = FakeServer(), []
    server.fails = [failed, failed]
    assert ask(server, waits=waits).retries == 2 and len(server.bodies) == 3 and len(waits) == 2


def test_the_servers_word_on_waiting_counts():
    server, waits = FakeServer(), []
    server.fails = [error(429, retry_after="7")]
    ask(server, waits=waits)
    assert waits == [7.0]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_is_not_asked_again(status):
    server = FakeServer()
    server.fails = [error(status, "bad model")]
    with pytest.raises(Refused, match="bad model") as caught:
        ask(server)
    assert caught.value.status == status and len(server.bodies) == 1


def test_it_gives_up_after_its_attempts():
    server = FakeServer()
    server.fails = [error(503)] * 10
    with pytest.raises(Refused):
        ask(server, attempts=3)
    assert len(server.bodies) == 3


def test_no_answer_in_time_and_broken_connections():
    async def run(raised):
        def handler(request):
            raise raised

        async def sleep(seconds):
            return None

        async with Endpoint("http://test/v1", transport=httpx.MockTransport(handler), attempts=2, sleep=sleep) as e:
            await e.chat({})

    for raised, said in (
        (httpx.ReadTimeout("slow"), "no answer in time"),
        (httpx.ConnectError("refused"), "ConnectError"),
    ):
        with pytest.raises(Refused, match=said) as caught:
            asyncio.run(run(raised))
        assert caught.value.status == 0


def test_the_key_is_sent_and_never_told(monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    server = FakeServer()
    ask(server, key_env="TEST_KEY")
    assert server.keys == [f"Bearer {KEY}"]
    server.fails = [error(401, f"the key {KEY} is wrong")]
    with pytest.raises(Refused) as caught:
        ask(server, key_env="TEST_KEY")
    assert KEY not in str(caught.value) and "***" in str(caught.value)
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(UserError, match="TEST_KEY"):
        ask(server, key_env="TEST_KEY")


def test_a_stream_comes_in_pieces():
    async def run():
        server = FakeServer(lambda b: ("one two", "think", "stop"))
        async with Endpoint("http://test/v1", transport=server.transport) as e:
            return [p async for p in e.stream("/chat/completions", {"messages": []})]

    pieces = asyncio.run(run())
    assert "".join(p.text for p in pieces) == "one two " and "".join(p.reasoning for p in pieces) == "think "
    assert [p.finish for p in pieces if p.finish] == ["stop"] and pieces[-1].usage.output == 3
    assert all(a.at_s <= b.at_s for a, b in pairwise(pieces))


def test_back_off_grows_and_is_bounded():
    for attempt in range(12):
        assert min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) / 2 <= back_off_s(attempt) <= LONGEST_WAIT_S


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += max(seconds, 1e-6)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 20), st.integers(500, 2000))
def test_no_minute_has_more_than_its_rate(sizes, requests, tokens):
    clock = Clock()
    limiter, sent = RateLimiter(requests, tokens, clock=clock, sleep=clock.sleep), []

    async def run():
        for size in sizes:
            await limiter.wait(size)
            sent.append((clock.now, size))

    asyncio.run(run())
    for start, _ in sent:
        inside = [size for at, size in sent if start <= at < start + 60]
        assert len(inside) <= requests and sum(inside) <= tokens


@given(st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 1)), min_size=1, max_size=40), st.floats(0.5, 8))
def test_the_ceiling_is_never_passed(costs, ceiling):
    ledger, seen = Ledger(ceiling), []

    async def one(at_most, share):
        try:
            await ledger.reserve(at_most)
        except CeilingReached:
            return
        await asyncio.sleep(0)
        await ledger.settle(at_most, at_most * share)
        seen.append(ledger.spent)

    async def run():
        await asyncio.gather(*(one(*cost) for cost in costs))

    asyncio.run(run())
    assert all(s <= ceiling * (1 + 1e-9) for s in seen)


def test_a_rest_of_fractions_keeps_nobody_waiting():
    """What was set aside comes back whole: with nothing under way, the ceiling is told and not waited for."""

    async def run():
        ledger = Ledger(1000.0)
        for k in range(200):
            await ledger.reserve(123.4 / (k + 7))
        for k in range(200):
            await ledger.settle(123.4 / (k + 7), 0.1 * k)
        with pytest.raises(CeilingReached):
            await asyncio.wait_for(ledger.reserve(1000.0), 5)

    asyncio.run(run())


def test_answers_are_kept_by_what_was_asked(tmp_path):
    cache = AnswerCache(tmp_path / "a.sqlite")
    key = key_of({"a": 1, "b": [2]})
    assert key == key_of({"b": [2], "a": 1}) != key_of({"a": 1, "b": [3]}) and cache.get(key) is None
    cache.put(key, {"text": "é", "cost": 0.25})
    cache.put("other", {"cost": 0.5})
    cache.close()
    again = AnswerCache(tmp_path / "a.sqlite")
    assert again.get(key) == {"text": "é", "cost": 0.25} and len(again) == 2 and again.money() == 0.75
    (tmp_path / "b.sqlite").write_text("no database at all, and long enough to be looked at as one " * 50)
    with pytest.raises(UserError, match="cache"):
        AnswerCache(tmp_path / "b.sqlite")


def test_prices_by_hand_and_from_the_catalogue():
    price = price_of(GivenPrice(input=0.5, output=2.0, cached_input=0.1, date="2026-11-01"))
    assert price.cost(1_000_000, 500_000, cached=400_000) == pytest.approx(0.3 + 0.04 + 1.0)
    assert price.to_json()["date"] == "2026-11-01"
    known = price_of("openai:gpt-4o-mini")
    assert (known.input, known.output) == (0.15, 0.6) and known.source.startswith("genai-prices ")
    with pytest.raises(UserError, match="knows no price"):
        price_of("nobody:at-all")
    with pytest.raises(ValueError, match="date"):
        GivenPrice(input=1.0, output=1.0, date="soon")


def test_the_room_imports_no_torch():
    import subprocess
    import sys

    code = "import sys, lamella.endpoint.client, lamella.endpoint.cache, lamella.endpoint.prices; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("key", ["sk-SECRET123\nX=1", "sk-SECRET123\x00", "ключ-SECRET123"])
def test_what_is_no_key_is_refused_and_not_shown(monkeypatch, key):
    if "\x00" in key:
        monkeypatch.setattr("os.environ", {"TEST_KEY": key})
    else:
        monkeypatch.setenv("TEST_KEY", key)
    with pytest.raises(UserError, match="one line of ASCII") as caught:
        ask(FakeServer(), key_env="TEST_KEY")
    assert "SECRET123" not in str(caught.value)


@pytest.mark.parametrize("details", [[1], "x", 3, None])
def test_odd_usage_is_no_usage(details):
    from lamella.endpoint.client import usage_of

    usage = usage_of(
        {"usage": {"prompt_tokens": 5, "completion_tokens_details": details, "prompt_tokens_details": details}}
    )
    assert (usage.input, usage.output, usage.reasoning, usage.cached_input) == (5, None, None, None)


def test_half_a_character_is_kept(tmp_path):
    cache = AnswerCache(tmp_path / "a.sqlite")
    cache.put("k", {"text": "\ud800", "cost": 1.0})
    assert cache.get("k")["text"] == "\ud800"


@pytest.mark.parametrize("date", ["9999-12-31", "1999-01-01"])
def test_dates_of_prices_are_of_our_time(date):
    with pytest.raises(ValueError, match="no date of a price"):
        GivenPrice(input=1.0, output=1.0, date=date)


@pytest.mark.parametrize(
    ("answer", "said"),
    [('{"cost": 0}', "'text'"), ("[1]", "no JSON object"), ("{", "is damaged"), ("null", "no JSON object")],
)
def test_a_damaged_answer_is_told(tmp_path, answer, said):
    cache = AnswerCache(tmp_path / "a.sqlite")
    cache._db.execute("insert into answers values ('k', ?)", (answer,))
    with pytest.raises(UserError, match=said) as told:
        cache.get("k", ("text", "cost"))
    assert told.value.path == str(tmp_path / "a.sqlite") and "delete it" in told.value.fix
    cache.close()
