"""Which device, threads and budget a rank gets."""

import os

import pytest

from lamella.config import build_run_config
from lamella.errors import UserError
from lamella.ranks.place import place_of

CORES = len(os.sched_getaffinity(0))


def config(**sections):
    return build_run_config({"store": "s", **sections})


def test_one_process_takes_compute():
    place = place_of(config(compute={"device": "cuda"}, memory={"budget": "2KiB"}), 0, 1, {})
    assert (place.device, place.threads, place.budget_bytes) == ("cuda", None, 2048)


def test_entries_come_before_common_settings():
    run = config(
        devices=[{"threads": 3, "budget": "1KiB"}, {"slowdown": 2.0}], memory={"budget": "2KiB"}, compute={"threads": 5}
    )
    first, second = place_of(run, 0, 2, {}), place_of(run, 1, 2, {})
    assert (first.threads, first.budget_bytes, first.slowdown) == (3, 1024, 1.0)
    assert (second.threads, second.budget_bytes, second.slowdown) == (5, 2048, 2.0)


def test_ranks_share_the_cores_of_their_own_host():
    env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert place_of(config(), 2, 4, env).threads == max(1, CORES // 2)


@pytest.mark.parametrize(("rank", "local"), [(0, 0), (3, 1)])
def test_a_gpu_per_local_rank(rank, local):
    env = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "2"}
    assert place_of(config(compute={"device": "cuda"}), rank, 4, env).device == f"cuda:{local}"


def test_gpus_are_counted_without_cpu_ranks_beside_them():
    run = config(devices=[{"device": "cpu"}, {"device": "cuda"}, {"device": "cuda"}, {"device": "cuda:5"}])
    assert [place_of(run, rank, 4, {}).device for rank in range(4)] == ["cpu", "cuda:0", "cuda:1", "cuda:5"]


def test_another_number_of_ranks_is_refused():
    with pytest.raises(UserError, match=r"2 entries in \[\[devices\]\], but 3 ranks"):
        place_of(config(devices=[{}, {}]), 0, 3, {})
