"""Who is lost, judged from beats; time is told."""

from dataclasses import replace

import pytest

from lamella.ranks.judge import DONE, Beat, Judge

GB = 1 << 30


def beat(number=1, **more):
    fields = {"progress": number, "step": 3, "doing": "computing step 4", "waits": False, "host": "a", "rss_bytes": GB,
              "free_bytes": 8 * GB}  # fmt: skip
    return Beat(number=number, **{**fields, **more})


def judge(world=3, **more):
    """Rank 0's, with silence of 10 s and patience of 100 s."""
    made = Judge(0, world, **{"silence_s": 10, "patience_s": 100, "place": "host:1", **more})
    made.hear([beat() for _ in range(world)])
    return made


def test_a_beat_survives_the_store():
    it = beat(7, ended="it's \u20ac broken", blames=2, oom_kills=5)
    assert Beat.from_json(it.to_json().encode()) == it


def test_a_silent_rank_is_lost_after_the_stated_time():
    j = judge()
    for n in range(2, 13):
        assert j.verdict() is None
        j.pass_time(1, True)
        j.hear([beat(n), beat(1), beat(n)])
    v = j.verdict()
    assert (v.rank, v.at_once) == (1, True)
    assert (
        "rank 1 is lost: no sign of life for 11 s. Its last completed step is 3; after that: computing step 4" in v.what
    )
    assert "LAMELLA_SILENCE_S" in v.fix


def test_a_rank_that_speaks_again_is_not_lost():
    j = judge()
    j.pass_time(9, True)
    j.hear([beat(2), beat(2), beat(2)])
    j.pass_time(9, True)
    assert j.verdict() is None


def test_silence_does_not_count_while_the_store_is_silent():
    j = judge()
    j.pass_time(9, False)
    j.pass_time(9, True)
    assert j.verdict() is None
    j.pass_time(9, False)
    j.pass_time(2, False)
    v = j.verdict()
    assert v.rank == 0 or v.rank is None
    assert "the store at host:1" in v.what
    assert "has not answered for 11 s" in v.what
    assert "rank 2: step 3 done, computing step 4" in v.what


def test_a_process_that_is_gone_is_missed_at_once():
    j = judge()
    j.gone(1, True)
    assert j.verdict() is None  # its goodbye may be on the way
    j.hear([beat(2), beat(1, ended=DONE), beat(2)])
    j.gone(1, True)
    assert j.verdict() is None
    j = judge()
    j.gone(2, True)
    j.gone(2, True)
    assert "rank 2 is lost: its process 0 is gone. Its last completed step is 3" in j.verdict().what


def test_many_silent_ranks_are_one_message():
    j = judge(4)
    j.pass_time(11, True)
    j.hear([beat(2), beat(1), beat(2), beat(1)])
    assert "rank 1 (and rank 3) is lost" in j.verdict().what


def test_a_rank_that_left_well_is_not_missed():
    j = judge()
    j.hear([beat(2), beat(2, ended=DONE), beat(2, ended=DONE)])
    j.pass_time(1000, True)
    assert j.verdict() is None
    assert j.nobody_listens(1e9)


def test_who_still_needs_the_store():
    j = judge()
    assert not j.nobody_listens(5)
    j.hear([beat(2), beat(2, ended=DONE), beat(2)])
    assert not j.nobody_listens(5)
    j.pass_time(6, True)
    assert j.nobody_listens(5)
    j.hear([beat(3), beat(2, ended=DONE), beat(3)])
    assert not j.nobody_listens(5)
    j.gone(2, True)
    j.gone(2, True)
    assert j.nobody_listens(5)


def test_the_first_error_goes_before_what_it_led_to():
    j = judge()
    j.hear([beat(2), beat(2, ended="rank 2 is lost: silent\n  fix: look", blames=2), beat(2)])
    v = j.verdict()
    assert (v.rank, v.what, v.fix, v.at_once) == (2, "rank 2 is lost: silent (seen by rank 1)", "look", False)
    j.hear([beat(3), beat(2, ended="rank 2 is lost", blames=2), beat(3, ended="disk full\n  fix: free some")])
    v = j.verdict()
    assert (v.rank, v.what, v.fix) == (2, "rank 2 failed after step 3: disk full", "free some")


def test_a_broken_connection_needs_a_short_silence_only():
    j = judge()
    j.pass_time(2, True)
    j.hear([beat(2), beat(1), beat(2)])
    assert j.suspect(3) is None
    j.pass_time(2, True)
    j.hear([beat(3), beat(1), beat(3)])
    assert j.suspect(3).rank == 1
    assert j.verdict() is None
    j.store_gone = "closed"
    assert "is gone (closed)" in j.suspect(3).what


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_is_stuck_when_another_waits_as_long(who):
    j = judge(2)
    works, waits = beat(1, doing="forward 7"), beat(1, waits=True)
    pair = [works, waits] if who == 0 else [waits, works]
    for n in range(2, 14):
        j.hear([replace(b, number=n) for b in pair])
        j.pass_time(9, True)
        if n < 12:
            assert j.verdict() is None
    v = j.verdict()
    assert v.rank == who
    assert f"rank {who}{' (this one)' if who == 0 else ''} makes no progress" in v.what
    assert f"while rank {1 - who} waits" in v.what
    assert "after that: forward 7" in v.what


def test_nobody_is_stuck_while_nobody_waits_or_all_go_on():
    j = judge(2)
    for n in range(2, 40):
        j.hear([beat(n, progress=1), beat(n, progress=1)])  # both compute, long
        j.pass_time(9, True)
        assert j.verdict() is None
    for n in range(40, 80):
        j.hear([beat(n, progress=1, waits=True), beat(n, progress=n)])
        j.pass_time(9, True)
        assert j.verdict() is None


def test_signs_of_memory_that_ran_out():
    j = judge()
    j.pass_time(11, True)
    j.hear([beat(2), beat(1), beat(2)])
    assert "memory" not in j.verdict().what
    j.hear([beat(3), beat(1), beat(3, oom_kills=1)])
    assert "probably ran out of memory: the kernel of a has killed a process" in j.verdict().what
    assert "rank held 1.07 GB" in j.verdict().what
    j = judge()
    j.hear([beat(2), beat(2, free_bytes=GB // 50, rss_bytes=30 * GB), beat(2)])
    j.pass_time(11, True)
    assert "probably ran out of memory: it held" in j.verdict().what


def test_b68_a_rank_killed_for_its_memory_is_told_with_what_was_planned():
    j = judge()
    j.pass_time(11, True)
    j.hear([beat(3), beat(1, planned_bytes=3 * GB), beat(3, oom_kills=1)])
    assert "(3.22 GB beyond the program were planned)" in j.verdict().what


def test_a_kill_on_another_host_is_no_sign():
    j = judge()
    j.hear([beat(2, host="a"), beat(2, host="b"), beat(2, host="a")])
    j.pass_time(11, True)
    j.hear([beat(3, host="a", oom_kills=4), beat(2, host="b"), beat(3, host="a", oom_kills=4)])
    assert "memory" not in j.verdict().what
