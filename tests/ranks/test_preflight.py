"""B65: links that hang or deliver zeros are found before the run."""

import time

import pytest

from lamella.ranks import preflight as module
from lamella.ranks.group import Ranks
from tests.ranks.processes import run_job

pytestmark = pytest.mark.distributed


def test_b65_good_links_pass_at_once(tmp_path):
    codes, texts = run_job("check_links", 3, tmp_path)
    assert codes == [0, 0, 0], texts


@pytest.mark.parametrize(
    ("op", "how", "message"),
    [
        ("sum", "hangs", "sum of ones over all ranks: rank 0: no end within 2 s; rank 1: no end within 2 s"),
        ("sum", "zeros", "sum of ones over all ranks: rank 1: 1024 of 1024 sums of ones are 0, not 2"),
        ("copy", "hangs", "copy from each rank to the next: rank 0: no end within 2 s; rank 1: no end within 2 s"),
        (
            "copy",
            "zeros",
            "copy from each rank to the next: rank 1: 1047576 of 1048576 bytes from rank 0 arrived wrong",
        ),
    ],
)
def test_b65_broken_links_stop_all_ranks_with_what_to_set(tmp_path, op, how, message):
    begin_s = time.monotonic()
    codes, texts = run_job("check_links", 2, tmp_path, op=op, how=how)
    assert codes == [2, 2], texts
    for rank, text in enumerate(texts):
        assert text.count("error:") == 1
        assert f"the links between the 2 ranks do not work: {message}" in text
        assert "set GLOO_SOCKET_IFNAME" in text
        assert float((tmp_path / f"took-{rank}").read_text()) < 6
    assert time.monotonic() - begin_s < 30


def test_b65_both_checks_together_end_in_30_s():
    assert 2 * (module.LIMIT_S + module._EXTRA_S) < 30


def test_b65_on_cards_the_message_says_how_to_go_round_the_peer_link():
    assert "NCCL_P2P_DISABLE=1" in module._fix("cuda:1")


def test_one_process_has_no_links():
    module.preflight(Ranks(0, 1), links=None)
