"""Two hosts (network namespaces) and a link that is cut for a while or for good."""

import time

import pytest
import torch

from tests.ranks.netns import two_hosts
from tests.ranks.processes import start_job
from tests.train.processes import LIMIT_S, free_port

pytestmark = pytest.mark.distributed
SILENCE_S = 6


def run_cut(folder, count, cut_s):
    """Steps on two hosts whose link is cut after the third one (for `cut_s`, None: for good): ended, seconds since."""
    with two_hosts() as hosts:
        port = free_port()
        ranks = [
            start_job("steps", folder, {"count": count},
                      hosts.env(2, r, port) | {"LAMELLA_SILENCE_S": str(SILENCE_S)}, netns=hosts.names[r])
            for r in range(2)
        ]  # fmt: skip
        deadline_s = time.monotonic() + LIMIT_S
        try:
            while not ((file := folder / "step-0").exists() and int(file.read_text() or 0) >= 3):
                assert time.monotonic() < deadline_s and all(r.process.is_alive() for r in ranks), ranks[
                    0
                ].stderr.read_text()
                time.sleep(0.01)
            hosts.cut()
            cut_at_s = time.monotonic()
            if cut_s is not None:
                time.sleep(cut_s)
                at_cut = (folder / "step-0").read_text()
                hosts.mend()
                assert int(at_cut) < count
            ended = []
            for rank in ranks:
                ended.append(rank.finish(deadline_s))
            return ended, time.monotonic() - cut_at_s
        finally:
            for rank in ranks:
                rank.send(9)


def test_a_link_cut_for_a_while_is_borne(tmp_path):
    ended, took_s = run_cut(tmp_path, 12, 2.0)
    assert [code for code, _ in ended] == [0, 0], ended
    assert took_s > 2
    expected = sum(2 * k + 1 for k in range(12))
    assert [torch.load(tmp_path / f"result-{r}") for r in range(2)] == [expected, expected]


def test_a_link_cut_for_good_ends_both_hosts(tmp_path):
    """Rank 0's host has the store: it sees that rank 1 is silent. Rank 1 sees that the store is."""
    ended, took_s = run_cut(tmp_path, 1000, None)
    assert [code for code, _ in ended] == [1, 1], ended
    assert SILENCE_S < took_s < SILENCE_S + 12
    steps = int((tmp_path / "step-0").read_text())
    here, there = (text for _, text in ended)
    assert here.count("error:") == there.count("error:") == 1
    assert "rank 1 is lost: no sign of life for" in here
    assert any(f"Its last completed step is {k}" in here for k in (steps - 1, steps, steps + 1))
    assert "rank 1 has lost the others: the store at 10.77.0.1:" in there
    assert "has not answered for" in there
    assert any(f"rank 0: step {k} done" in there for k in (steps - 1, steps, steps + 1))
