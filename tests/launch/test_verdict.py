"""One cause out of the ends of all ranks."""

import signal

from lamella.launch.verdict import End, Verdict, decide

LOST = {"text": "rank 0 lost the other ranks", "lost": True}


def test_bad_input_comes_before_all_else():
    ends = [End(0, 1, "lost", lost=True, time_s=1.0), End(1, 2, "no such file", 2, time_s=2.0), End(2, -9)]
    assert decide(ends, False) == Verdict(2, "no such file", False)


def test_bad_input_reported_by_a_rank_that_the_agent_ended_counts():
    """It was on its way out when SIGTERM came."""
    assert decide([End(1, 1, **LOST), End(0, -15, "no such file", 2)], False) == Verdict(2, "no such file", False)


def test_of_all_ranks_own_failures_the_first_is_said_once():
    ends = [End(0, 1, "second", time_s=2.0), End(1, 1, "first", time_s=1.0), End(2, 1, **LOST)]
    assert decide(ends, False) == Verdict(1, "first", False)


def test_a_killed_rank_is_named_with_what_the_others_say():
    found = decide([End(1, -signal.SIGKILL), End(0, 1, **LOST)], False)
    assert (found.exit_code, found.again) == (1, True)
    assert "rank 1 was ended by SIGKILL" in found.text
    assert "rank 0 lost the other ranks" in found.text


def test_ranks_ended_by_the_agent_are_not_the_cause():
    found = decide([End(0, -signal.SIGTERM), End(1, 139, log="last words")], False)
    assert found == Verdict(1, "rank 1 ended with exit code 139:\nlast words", True)


def test_ranks_that_only_lost_each_other_are_started_again():
    for ends in ([End(0, 1, **LOST)], [End(0, 1, **LOST), End(1, -signal.SIGTERM)]):
        assert decide(ends, False) == Verdict(1, LOST["text"], True)


def test_stopped():
    stopped = Verdict(130, "interrupted", False)
    assert decide([End(0, 130), End(1, 130)], True) == stopped
    assert decide([End(0, 130), End(1, 1, **LOST)], True) == stopped
    assert decide([End(0, 130), End(1, -signal.SIGTERM)], False) == stopped
    killed = decide([End(0, 130), End(1, -signal.SIGKILL)], True)
    assert (killed.exit_code, killed.again) == (130, False)
    assert "rank 1 was ended by SIGKILL" in killed.text
    assert decide([End(0, 130), End(1, -signal.SIGINT)], False) == stopped
    assert decide([End(0, 130), End(1, -signal.SIGKILL)], False).again
