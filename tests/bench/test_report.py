"""Lines of `bench.train` from recorded answers."""

import pytest

from bench.report import compare, fastest_peer


def answer(tokens_per_s, beyond, *, loss=10.5, trainable=100):
    return {
        "tokens_per_s": tokens_per_s, "peak_rss_bytes": 400 + beyond, "import_rss_bytes": 400, "trainable": trainable,
        "losses": [10.6, loss], "dead_tensors": 0, "frozen_bytes": {"torch.uint8": 5}, "trainable_dtypes": ["torch.float32"],
        "versions": {"torch": "2"},
    }  # fmt: skip


OURS = [answer(300.0, 90), answer(100.0, 100), answer(200.0, 500)]


def test_medians_and_ratios_are_how_many_times_better_we_are():
    speed, whole, beyond, loss = compare(OURS, [answer(50.0, 300), answer(40.0, 300), answer(60.0, 250)])
    assert (speed["ours"], speed["value_of_peer"], speed["ratio"]) == (200.0, 50.0, 4.0)
    assert speed["ours_range"] == [100.0, 300.0]
    assert (whole["ours"], whole["value_of_peer"]) == (500, 700)
    assert (beyond["ours"], beyond["value_of_peer"], beyond["ratio"]) == (100, 300, 3.0)
    assert (loss["ours_first"], loss["steps"]) == (10.6, 2)


def test_sides_that_train_different_adapters_are_refused():
    with pytest.raises(RuntimeError, match="100 and 7 trainable"):
        compare(OURS, [answer(50.0, 300, trainable=7)])


def test_the_yardstick_is_the_fastest_peer_not_the_leanest():
    line = fastest_peer(OURS, {"slow and lean": [answer(50.0, 150)], "fast": [answer(80.0, 200)]}, 2.5)
    assert (line["peer"], line["tokens_per_s_ratio"], line["memory_share"]) == ("fast", 2.5, 0.5)
    assert (line["leanest_peer"], line["memory_share_of_leanest"]) == ("slow and lean", 0.667)
    assert line["met"] == {"speed": True, "memory": True, "loss": True}
    assert line["all_met"]


@pytest.mark.parametrize(
    ("peer", "bar", "missed"),
    [
        (answer(80.0, 200), 2.6, "speed"),
        (answer(80.0, 199), 2.5, "memory"),
        (answer(80.0, 200, loss=10.6), 2.5, "loss"),
    ],
)
def test_a_bar_that_is_missed_is_named(peer, bar, missed):
    line = fastest_peer(OURS, {"only": [peer]}, bar)
    assert [name for name, met in line["met"].items() if not met] == [missed]
    assert not line["all_met"]
