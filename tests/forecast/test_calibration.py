"""Factors learnt from runs whose truth is known."""

import json
import random
from dataclasses import dataclass, replace

import pytest

from lamella.errors import UserError
from lamella.forecast.calibration import (
    FILE,
    LEAST,
    MOST,
    Calibration,
    Identity,
    Pass,
    calibrate,
    fit_passes,
    load_calibration,
)
from lamella.forecast.events import play
from tests.forecast import runs
from tests.forecast.runs import listed, write_run

HERE = Identity(**runs.HERE)


@dataclass(frozen=True)
class Times:
    """Experts per token in most layers, dense ones first; attention per pair; with factors, the truth."""

    experts: float = 1.0
    attention: float = 1.0
    dequantise_by: float = 1.0
    noise: float = 0.0

    def _pass(self, layer, lengths, times):
        rng = random.Random(f"{layer} {lengths} {times}")
        seconds = {
            "attention": times * self.attention * 0.02 * sum(n * n for n in lengths),
            "rows": times * 0.05 * sum(lengths),
        }
        seconds["experts" if layer >= 2 else "linear"] = times * (self.experts if layer >= 2 else 1.0) * sum(lengths)
        return {cause: value * (1 + self.noise * rng.uniform(-1, 1)) for cause, value in seconds.items()}

    def forward(self, layer, lengths):
        return self._pass(layer, lengths, 1.0)

    def backward(self, layer, lengths, recompute):
        return self._pass(layer, lengths, 3.0)

    def dequantise(self, layer):
        return 4.0 * self.dequantise_by

    def hang(self, layer):
        return 0.5

    def prologue(self, tokens):
        return 0.01 * tokens

    def head(self, label_tokens):
        return 0.5 * label_tokens

    def update(self, parameters):
        return 0.001 * parameters


TRUTH = Times(experts=1.3, attention=0.9, dequantise_by=1.5)
RUNS = {"short": (8,) * 6, "long": (60, 60), "mixed": (40, 20, 10, 8)}


def step_s(times, lengths):
    return play(listed(times, lengths), {"disk": 10.0}).step_s


@pytest.fixture
def learnt(tmp_path):
    """`calibration.json` after a short and a long run."""
    path = tmp_path / FILE
    for name in ("short", "long"):
        calibrate(write_run(tmp_path / name, Times(), TRUTH, lengths=RUNS[name]), path)
    return path


def test_factors_of_experts_and_attention_are_found(learnt):
    calibration = load_calibration(learnt, [HERE])
    assert calibration.notices == ()
    factors = calibration.factors(HERE)
    assert factors["experts"] == pytest.approx(1.3, abs=0.02)
    assert factors["attention"] == pytest.approx(0.9, abs=0.02)
    assert factors["dequantise"] == pytest.approx(1.5)
    assert [factors[cause] for cause in ("head", "embed", "optimizer")] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("lengths", [RUNS["mixed"], (30,) * 4, (16,) * 8])
def test_a_later_forecast_is_within_one_percent(learnt, lengths):
    wanted = step_s(TRUTH, lengths)
    calibrated = load_calibration(learnt, [HERE]).apply(Times(), HERE)
    assert abs(step_s(Times(), lengths) / wanted - 1) > 0.02
    assert step_s(calibrated, lengths) == pytest.approx(wanted, rel=0.01)


def test_noise_of_single_pieces_is_averaged(tmp_path):
    truth = Times(1.3, 0.9, 1.5, noise=0.05)
    for name in ("short", "long"):
        calibrate(write_run(tmp_path / name, Times(), truth, lengths=RUNS[name]), tmp_path / FILE)
    calibrated = load_calibration(tmp_path / FILE, [HERE]).apply(Times(), HERE)
    assert step_s(calibrated, RUNS["mixed"]) == pytest.approx(step_s(TRUTH, RUNS["mixed"]), rel=0.02)


def test_without_the_file_plans_are_as_before(learnt):
    learnt.unlink()
    calibration = load_calibration(learnt, [HERE])
    times = Times()
    assert calibration == Calibration() and calibration.apply(times, HERE) is times and calibration.lines(HERE) == []


def test_a_run_planned_with_factors_shows_the_same(tmp_path, learnt):
    """Its ratios are near 1, and the factors stay."""
    before = load_calibration(learnt, [HERE])
    run = write_run(tmp_path / "third", before.apply(Times(), HERE), TRUTH, lengths=RUNS["mixed"],
                    factors=before.factors(HERE))  # fmt: skip
    after = calibrate(run, learnt)
    assert after.factors(HERE) == pytest.approx(before.factors(HERE), rel=0.02)
    assert [r.run.rpartition("/")[2] for r in after.entries[0].runs] == ["short", "long", "third"]
    assert "calibrated by 3 runs" in after.lines(HERE)[0] and "experts x1." in after.lines(HERE)[0]


def test_the_same_run_again_takes_its_own_place(tmp_path, learnt):
    before = json.loads(learnt.read_text())
    calibrate(tmp_path / "short", learnt)
    after = json.loads(learnt.read_text())
    assert len(after["entries"][0]["runs"]) == 2
    assert after["entries"][0]["factors"] == pytest.approx(before["entries"][0]["factors"])


def test_one_odd_run_changes_little(tmp_path, learnt):
    for k, name in enumerate(RUNS):
        calibrate(write_run(tmp_path / f"more {k}", Times(), TRUTH, lengths=RUNS[name]), learnt)
    odd = Times(experts=4.0, attention=4.0, dequantise_by=9.0)
    factors = calibrate(write_run(tmp_path / "odd", Times(), odd, lengths=(30,) * 4), learnt).factors(HERE)
    assert factors["dequantise"] == pytest.approx(1.5)
    assert factors["experts"] == pytest.approx(1.3, rel=0.1)


def test_factors_stay_in_their_range(tmp_path):
    far = Times(experts=9.0, attention=9.0, dequantise_by=0.01)
    factors = calibrate(write_run(tmp_path / "run", Times(), far), tmp_path / FILE).factors(HERE)
    assert factors["experts"] == MOST and factors["dequantise"] == LEAST
    (line,) = load_calibration(tmp_path / FILE).lines(HERE)
    assert f"experts x{MOST:.2f} (the most that is taken)" in line


def test_like_passes_alone_give_one_factor_and_noise_no_wild_ones():
    rng = random.Random(3)
    planned = {"experts": 0.6, "attention": 0.2, "rows": 0.2}
    passes = [Pass(planned={c: s * k for c, s in planned.items()}, measured=1.2 * k * (1 + rng.uniform(-0.03, 0.03)))
              for k in (1, 3)]  # fmt: skip
    assert fit_passes(passes) == pytest.approx(dict.fromkeys(planned, 1.2), rel=0.04)
    nearly = [Pass(planned={"experts": 0.6, "attention": 0.4}, measured=1.2),
              Pass(planned={"experts": 0.62, "attention": 0.38}, measured=1.2 * 1.03)]  # fmt: skip
    assert all(1.0 < factor < 1.5 for factor in fit_passes(nearly).values())


def test_traced_steps_of_other_lengths(tmp_path):
    """A little longer: taken per token; much longer: refused."""
    run = write_run(tmp_path / "run", Times(), Times(), lengths=(20,) * 10, real=(20,) * 11)
    factors = calibrate(run, tmp_path / FILE).factors(HERE)
    assert (factors["experts"], factors["attention"]) == (pytest.approx(1, rel=1e-3), pytest.approx(1, rel=1e-3))
    run = write_run(tmp_path / "longer", Times(), Times(), lengths=(20,) * 10, real=(20,) * 20)
    with pytest.raises(UserError, match="not comparable"):
        calibrate(run, tmp_path / FILE)


@pytest.mark.parametrize("lacks", ["traced", "receipt"])
def test_runs_that_show_nothing_are_refused(tmp_path, lacks):
    run = write_run(tmp_path / "run", Times(), TRUTH, **{lacks: 0})
    with pytest.raises(UserError, match="trace" if lacks == "traced" else "receipt"):
        calibrate(run, tmp_path / FILE)
    assert not (tmp_path / FILE).exists()


def test_a_run_that_did_not_do_what_it_was_planned_to_is_refused(tmp_path):
    run = write_run(tmp_path / "run", Times(), TRUTH, dtype="fp32")
    with pytest.raises(
        UserError, match=r"plan was for G80, 2 threads, bf16, rates alone, .* the run computed on G80, 2 threads, fp32"
    ):
        calibrate(run, tmp_path / FILE)


def test_keeping_and_recomputing_have_factors_of_their_own_and_stand_in_for_each_other(learnt):
    calibration = load_calibration(learnt)
    kept = HERE.model_copy(update={"kept": not HERE.kept})
    assert calibration.factors(kept) == calibration.factors(HERE)
    entry = calibration.entries[0].model_copy(update={"identity": kept, "factors": {"experts": 3.0}})
    both = replace(calibration, entries=(*calibration.entries, entry))
    assert both.factors(kept) == {"experts": 3.0}
    assert both.factors(HERE) == calibration.factors(HERE)


def test_other_devices_and_older_code_are_not_used(learnt):
    for change in ({"threads": 8}, {"kernels": True}, {"device": "G40"}, {"dtype": "fp32"}):
        other = HERE.model_copy(update=change)
        calibration = load_calibration(learnt, [other, HERE])
        assert calibration.factors(other) == {} and calibration.factors(HERE)
        assert len(calibration.notices) == 1 and other.text() in calibration.notices[0]
    tree = json.loads(learnt.read_text())
    tree["entries"][0]["lamella"] = "0.0.1"
    learnt.write_text(json.dumps(tree))
    calibration = load_calibration(learnt, [HERE])
    assert calibration.factors(HERE) == {}
    assert "lamella 0.0.1" in calibration.notices[0]


def damaged(tree, how):
    if how == "json":
        return '{"kind": "lamella calibration",\n"entries": [,]}'
    if how == "kind":
        return "[]"
    tree.update({"version": {"format_version": 9}, "key": {"entriez": []}}[how])
    return json.dumps(tree, indent=1)


@pytest.mark.parametrize(("how", "what", "line"), [("json", "not JSON", 2), ("kind", "not a calibration", 1),
                                                   ("version", "format version 9", 1), ("key", "entriez", None)])  # fmt: skip
def test_a_damaged_file_is_refused(learnt, how, what, line):
    learnt.write_text(damaged(json.loads(learnt.read_text()), how))
    with pytest.raises(UserError, match=what) as caught:
        load_calibration(learnt, [HERE])
    assert caught.value.path == str(learnt)
    assert line is None or caught.value.line == line
