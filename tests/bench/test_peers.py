"""How a peer is run, set up and reported when it fails; no peer is installed here."""

import json
import sys

import pytest

from bench import peers, train
from lamella.errors import UserError

ECHO = "import json, os, sys; job = json.load(sys.stdin); print('noise'); print(json.dumps({**job, 'env': dict(os.environ)}))"


def test_a_side_gets_its_job_threads_and_variables():
    answer = peers.ask([sys.executable, "-c", ECHO], {"threads": 3, "x": 1}, {"A_SETTING": "1"})
    assert answer["x"] == 1
    assert (answer["env"]["OMP_NUM_THREADS"], answer["env"]["A_SETTING"]) == ("3", "1")


def test_a_side_that_fails_says_why():
    code = "import sys; sys.stderr.write('warning\\nNotImplementedError: no GPU\\n\\n'); sys.exit(3)"
    with pytest.raises(peers.SideFailed, match="ended with 3") as failed:
        peers.ask([sys.executable, "-c", code], {})
    assert failed.value.reason == "NotImplementedError: no GPU"


def test_an_environment_with_the_pins_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    made = peers.Environment("there", ("a==1", "b==2"), unwanted=("c",))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / ".pins").write_text("a==1\nb==2\nnot c")
    assert made.python() == tmp_path / "there" / "bin" / "python"
    assert not (tmp_path / "there" / "bin").exists()


def test_every_peer_pins_everything_it_names_and_one_torch():
    for environment in (peers.TRANSFORMERS, peers.UNSLOTH, peers.SWIFT):
        assert all("==" in pin for pin in environment.pins)
        assert "torch==2.13.0" in environment.pins


def run_case(monkeypatch, capsys, answers, peer="all"):
    """`bench.train.run_case` on two peers whose sides are recorded: own, then each by its script."""

    def ask(command, job, variables=None):
        found = answers["own" if "bench.own_train" in command else command[0]]
        if isinstance(found, Exception):
            raise found
        return found

    both = (
        peers.Peer("good", "transformers", peers.TRANSFORMERS, "x.py"),
        peers.Peer("bad", "unsloth", peers.UNSLOTH, "y.py"),
    )
    monkeypatch.setattr(peers, "ask", ask)
    monkeypatch.setattr(peers.Peer, "command", lambda self: [self.name])
    case = train.Case("a case", "moe", train.MOE_115M, "attention", both, 2.0)
    args = train.parse(["--runs", "2", "--peer", peer])
    train.run_case(case, None, 7, args)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def recorded(rate):
    return {
        "tokens_per_s": rate, "peak_rss_bytes": 200, "import_rss_bytes": 100, "trainable": 1, "losses": [10.0],
        "dead_tensors": 0, "frozen_bytes": {}, "trainable_dtypes": [], "versions": {},
    }  # fmt: skip


def test_a_peer_that_fails_is_named_with_its_error_and_pins(monkeypatch, capsys):
    failure = peers.SideFailed(["y"], 1, "RuntimeError: you need a GPU\n")
    lines = run_case(monkeypatch, capsys, {"own": recorded(300.0), "good": recorded(100.0), "bad": failure})
    (error,) = [line for line in lines if "error" in line]
    assert (error["peer"], error["error"]) == ("bad", "RuntimeError: you need a GPU")
    assert "unsloth==2026.10.9" in error["pins"]
    assert (lines[-1]["figure"], lines[-1]["peer"], lines[-1]["tokens_per_s_ratio"]) == ("fastest_peer", "good", 3.0)


def test_one_peer_can_be_chosen_and_its_failure_ends_without_a_yardstick(monkeypatch, capsys):
    failure = peers.SideFailed(["y"], 1, "RuntimeError: you need a GPU\n")
    lines = run_case(monkeypatch, capsys, {"own": recorded(300.0), "bad": failure}, peer="unsloth")
    assert [line["peer"] for line in lines] == ["bad"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "2"], "--steps is 2"),
        (["--runs", "0"], "--runs is 0"),
        (["--case", "nothing"], "names no case"),
    ],
)
def test_bad_arguments_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        train.parse(arguments)


def test_the_cases_are_those_of_the_issue():
    bars = {case.name: case.bar for case in train.CASES}
    assert bars == {
        "dense-88M, LoRA on attention": 1.7,
        "moe-115M, LoRA on attention": 2.5,
        "moe-115M, LoRA on attention and experts": 3.0,
        "moe-1.2B, LoRA on attention": 3.0,
        "moe-1.2B, LoRA on attention and experts": 3.0,
    }
    for case in train.CASES:
        assert {peer.group for peer in case.peers} == {"transformers", "unsloth", "ms-swift"}
