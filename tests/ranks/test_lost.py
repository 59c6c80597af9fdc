"""A rank that is killed, frozen, stuck or out of memory ends the others in the stated time, with its name and last step."""

import signal
import time

import pytest

from tests.ranks.processes import run_job

pytestmark = pytest.mark.distributed

SILENCE_S = 4
ENV = {"LAMELLA_SILENCE_S": str(SILENCE_S)}
SLACK_S = 12
"""Beyond the silence: the grace, and a machine that is busy with other tests."""


def lose(folder, world=2, env=ENV, how="freeze", op="sum"):
    """Texts of the survivors by rank; all of them ended with code 1 and one message."""
    codes, texts = run_job("lose", world, folder, env, lost=None if how == "kill" else 1, op=op, how=how)
    assert codes == [-signal.SIGKILL if how == "kill" and r == 1 else None if r == 1 else 1 for r in range(world)], (
        texts
    )
    began_s = float((folder / "began-0").read_text())
    survivors = {r: texts[r] for r in range(world) if r != 1}
    for text in survivors.values():
        assert text.count("error:") == 1, text
    return survivors, time.time() - began_s


@pytest.mark.parametrize("op", ["sum", "receive", "send"])
def test_a_frozen_rank_ends_one_that_waits_for_it(tmp_path, op):
    """gloo waits in C++ and says nothing: the watching thread ends the process, after the last words."""
    texts, took_s = lose(tmp_path, op=op)
    assert "rank 1 is lost: no sign of life for" in texts[0]
    assert "Its last completed step is 2; after that: computing step 3" in texts[0]
    assert "rank 1 is lost" in (tmp_path / "last-words-0").read_text()
    assert SILENCE_S < took_s < SILENCE_S + SLACK_S


def test_a_frozen_rank_ends_one_that_computes_when_it_comes_by(tmp_path):
    texts, _ = lose(tmp_path, op="compute")
    assert "rank 1 is lost: no sign of life for" in texts[0]
    assert (tmp_path / "ended-0").exists()
    assert not (tmp_path / "last-words-0").exists()


def test_a_frozen_rank_ends_one_that_computes_and_never_comes_by(tmp_path):
    texts, _ = lose(tmp_path, op="deaf compute")
    assert "rank 1 is lost: no sign of life for" in texts[0]
    assert not (tmp_path / "ended-0").exists()
    assert "rank 1 is lost" in (tmp_path / "last-words-0").read_text()


@pytest.mark.parametrize("op", ["sum", "receive", "group"])
def test_a_killed_rank_is_named_by_all_others(tmp_path, op):
    """gloo says that a connection broke, not whose; rank 2 may only see that rank 0 went."""
    texts, took_s = lose(tmp_path, world=3, how="kill", op=op)
    for text in texts.values():
        assert "rank 1 is lost: its process" in text
        assert "Its last completed step is 2; after that: computing step 3" in text
    assert took_s < SLACK_S


def test_a_stuck_rank_ends_all_and_itself(tmp_path):
    codes, texts = run_job(
        "lose", 2, tmp_path, {"LAMELLA_RANK_TIMEOUT_S": "3", "LAMELLA_SILENCE_S": "20"}, op="sum", how="stall"
    )
    assert codes == [1, 1]
    for text in texts:  # whichever sees it first tells the other
        assert "rank 1 makes no progress" in text or "rank 1 (this one) makes no progress" in text
        assert "while rank 0 waits. Its last completed step is 2; after that: computing step 3" in text


@pytest.mark.parametrize(("how", "message"), [("memory", "probably out of memory, with"), ("exit", "SystemExit 7")])
def test_a_rank_that_ends_with_an_error_shows_it_to_all(tmp_path, how, message):
    codes, texts = run_job("lose", 3, tmp_path, ENV, op="sum", how=how)
    assert [codes[0], codes[2]] == [1, 1], texts
    assert codes[1] in (1, 7)
    for rank in (0, 2):
        assert "rank 1 failed after step 2: " in texts[rank]
        assert message in texts[rank]


@pytest.mark.parametrize("name", ["LAMELLA_SILENCE_S", "LAMELLA_RANK_TIMEOUT_S"])
@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "nan"])
def test_times_must_be_seconds(monkeypatch, name, text):
    from lamella.errors import UserError
    from lamella.ranks.group import Ranks

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=f"{name} is"):
        Ranks.join()
