import asyncio
import heapq
import itertools

import pytest

from lamella.errors import UserError
from lamella.loadtest.drive import Clock, Until, arrivals, closed_loop, open_loop
from lamella.loadtest.measure import Answer, Sample, figures, parse_time, read_targets, summarise
from lamella.report.artifacts import load_test


class Virtual:
    """Time that moves only when everyone waits."""

    def __init__(self):
        self.now_s, self.queue, self.n = 100.0, [], 0

    @property
    def clock(self):
        return Clock(lambda: self.now_s, self.sleep)

    async def sleep(self, seconds):
        future = asyncio.get_running_loop().create_future()
        self.n += 1
        heapq.heappush(self.queue, (self.now_s + seconds, self.n, future))
        await future

    async def drive(self, work):
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if self.queue and not task.done():
                self.now_s, _, future = heapq.heappop(self.queue)
                future.set_result(None)
        return task.result()


class Server:
    """Takes `service_s` for each request, one after another."""

    def __init__(self, virtual, service_s):
        self.virtual, self.service_s, self.free_s, self.asked = virtual, service_s, 0.0, []
        self.most = self.running = 0

    async def __call__(self, number):
        self.asked.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        self.free_s = max(self.free_s, self.virtual.now_s) + self.service_s
        await self.virtual.sleep(self.free_s - self.virtual.now_s)
        self.running -= 1
        return Answer(self.virtual.now_s, "ok")


def test_closed_loop_has_so_many_in_flight_and_sends_so_many():
    virtual = Virtual()
    server = Server(virtual, 1.0)
    samples = asyncio.run(virtual.drive(closed_loop(server, 3, Until(7), virtual.clock, first=10)))
    assert server.most == 3 and sorted(server.asked) == list(range(10, 17))
    assert [s.e2e_s for s in samples] == [1, 2, 3, 3, 3, 3, 3]
    assert virtual.now_s == 107


def test_duration_ends_sending_and_waits_for_what_is_on_its_way():
    virtual = Virtual()
    server = Server(virtual, 2.0)
    samples = asyncio.run(virtual.drive(closed_loop(server, 1, Until(duration_s=5), virtual.clock)))
    assert len(samples) == 3 and virtual.now_s == 106


def test_open_loop_counts_from_when_a_request_was_due():
    """A server of half the rate: the wait grows with every request, which a closed loop never sees."""
    virtual = Virtual()
    due = list(arrivals(10.0, 7, Until(50)))
    samples = asyncio.run(virtual.drive(open_loop(Server(virtual, 0.2), 10.0, 7, Until(50), virtual.clock)))
    free, expected = 0.0, []
    for at in due:
        free = max(free, at) + 0.2
        expected.append(free - at)
    assert [s.e2e_s for s in samples] == pytest.approx(expected)
    assert samples[-1].e2e_s > 3


def test_a_late_client_is_part_of_the_latency():
    sample = Sample(10.0, 12.0, Answer(15.0, "ok", 13.0, 14.0, 5, 5))
    assert (sample.e2e_s, sample.ttft_s, sample.tpot_s) == (5.0, 3.0, 0.25)


def test_arrivals_are_poisson_and_seeded():
    times = list(arrivals(20.0, 1, Until(duration_s=200)))
    assert times == list(arrivals(20.0, 1, Until(duration_s=200))) != list(arrivals(20.0, 2, Until(duration_s=200)))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.05, rel=0.05) and spread == pytest.approx(mean, rel=0.1)
    assert len(list(arrivals(20.0, 1, Until(3, 200)))) == 3


def sample(e2e_s, status="ok", **of):
    return Sample(0.0, 0.0, Answer(e2e_s, status, **of))


SAMPLES = [
    sample(1.0, first_s=0.2, last_s=1.0, input=10, output=5, reasoning=2, label="completed"),
    sample(2.0, first_s=0.4, last_s=2.0, input=20, output=9, reasoning=4, label="truncated"),
    sample(3.0, first_s=0.6, last_s=3.0, input=30, output=1, reasoning=0, label="invalid"),
    sample(4.0, first_s=0.8, last_s=4.0, input=40, output=11, reasoning=6, label="completed"),
    sample(0.1, "rejected", said="full"),
    sample(0.2, "error", said="broken"),
]


def test_counts_rates_and_labels():
    tree = summarise(SAMPLES, 10.0, {"e2e": 2.0})
    assert tree["requests"] == {"sent": 6, "ok": 4, "rejected": 1, "errors": 1}
    assert tree["labels"] == {"completed": 2, "truncated": 1, "invalid": 1}
    assert tree["tokens"] == {"input": 100, "output": 26, "reasoning": 12}
    assert tree["throughput"] == {"requests_per_s": 0.4, "output_tokens_per_s": 2.6, "labels_per_s": 0.2}
    assert tree["goodput"] == {"target": {"e2e": "2 s"}, "requests_per_s": 0.2, "share": 2 / 6}
    assert tree["e2e_s"]["mean"] == 2.5 and tree["e2e_s"]["samples"] == 4
    assert tree["label_s"]["mean"] == 2.5 and tree["label_s"]["samples"] == 2
    assert tree["tpot_s"]["samples"] == 3 and tree["tpot_s"]["mean"] == pytest.approx((0.2 + 0.2 + 0.32) / 3)
    assert tree["errors"] == [{"said": "broken", "count": 1}]


@pytest.mark.parametrize(
    ("targets", "good"),
    [({"label": 9.0}, 2), ({"ttft": 0.3}, 1), ({"tpot": 0.25}, 2), ({"e2e": 3.0, "ttft": 0.4}, 2), ({"e2e": 0.01}, 0)],
)
def test_goodput_needs_every_target(targets, good):
    assert summarise(SAMPLES, 1.0, targets)["goodput"]["requests_per_s"] == good


def test_percentiles_say_of_how_many():
    few, enough = figures(list(range(1, 12))), figures(list(range(101)))
    assert (few["p50"], few["p90"], few["samples"], few["few_for_p99"]) == (6, 10, 11, True)
    assert (enough["p99"], enough["few_for_p99"]) == (99, False)
    assert figures([]) is None


def test_nothing_answered_has_no_figures_and_the_page_shows_it():
    tree = summarise([sample(0.1, "rejected")], 1.0, {})
    assert tree["e2e_s"] is None and tree["labels"] is None and tree["throughput"]["labels_per_s"] is None
    shown = load_test({**tree, "url": "u", "model": "m"}, "loadtest-0", "n")
    assert "1 told to wait (429)" in str(shown)


def test_targets_and_times():
    assert read_targets(["e2e=2s", "ttft=300ms"]) == {"e2e": 2.0, "ttft": 0.3}
    assert [parse_time(t, "") for t in ("5min", "1h", "3")] == [300, 3600, 3]
    for bad in (["e2e"], ["e2e=0s"], ["speed=2s"], ["e2e=2s", "e2e=3s"], ["e2e=nans"], ["e2e=-1ms"]):
        with pytest.raises(UserError):
            read_targets(bad)
