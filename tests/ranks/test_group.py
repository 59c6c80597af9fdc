"""Groups, transfers and notes between real processes."""

import pytest
import torch

from tests.ranks.processes import run_job

pytestmark = pytest.mark.distributed


def results(world, folder):
    return [torch.load(folder / f"result-{r}") for r in range(world)]


def test_groups_sum_and_gather(tmp_path):
    codes, texts = run_job("groups", 3, tmp_path)
    assert codes == [0, 0, 0], texts
    a, b, c = results(3, tmp_path)
    assert a["members"] == ((0, 1), (1, 2))
    assert [r["index"] for r in (a, b, c)] == [(0, None), (1, 0), (None, 1)]
    for i in range(3):
        assert a["low"][i].dtype == a["mine"][i].dtype
        expected = (a["mine"][i].float() + b["mine"][i].float()).to(a["mine"][i].dtype)
        assert torch.equal(a["low"][i], expected)
        assert torch.equal(b["low"][i], expected)
    assert a["gathered"].tolist() == b["gathered"].tolist() == [10] * 4 + [11] * 4
    assert b["high"].tolist() == c["high"].tolist() == [5.0]
    assert b["in place"].tolist() == c["in place"].tolist() == [21] * 4 + [22] * 4
    assert (c["alone"][0].tolist(), c["alone"][1].tolist()) == ([5.0], [1, 2])
    assert a["foreign"] == "rank 0 is none of ranks 2"


def test_transfers_find_each_other_by_tag(tmp_path):
    codes, texts = run_job("transfers", 2, tmp_path)
    assert codes == [0, 0], texts
    assert results(2, tmp_path) == [True, True]


def test_waiting_and_bytes_are_recorded(tmp_path):
    codes, texts = run_job("spans", 2, tmp_path)
    assert codes == [0, 0], texts
    sender, receiver = results(2, tmp_path)
    waited = sum(s for cause, _, peer, lane, s in receiver if (cause, peer, lane) == ("wait_peer", 0, "main"))
    assert waited > 0.1
    assert [(n, peer) for cause, n, peer, _, _ in receiver if cause == "receive" and n] == [(1024, 0)]
    assert [(n, peer) for cause, n, peer, _, _ in sender if cause == "send" and n] == [(1024, 1)]
    assert [n for cause, n, _, _, _ in sender if cause == "reduce"] == [16]


def test_notes_go_through_the_store(tmp_path):
    codes, texts = run_job("notes", 2, tmp_path)
    assert codes == [0, 0], texts
    assert results(2, tmp_path) == [("from 1", ""), ("from 0", "")]
