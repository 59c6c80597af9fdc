"""docs/case-235b.md: every figure in it is computed here."""

import json
import re
import tempfile
from pathlib import Path

import pytest

from lamella.config import DeviceConfig, LoraConfig, SplitConfig, TrainConfig
from lamella.forecast.describe import shape_of
from lamella.forecast.forecast import Question, forecast
from lamella.forecast.offload import offload_floor
from lamella.forecast.rows import given_rows
from lamella.forecast.trainable import alternatives, sites_of, trainable_set
from lamella.hardware.machines import open_machine
from tests.checkpoint.published import CONFIGS

DOC = Path(__file__).parents[2] / "docs" / "case-235b.md"
ROWS = given_rows(3600, 4096, 4096)
STEP = TrainConfig(tokens_per_step=32768)
HEAD = "| machine | how | hours | tokens/s | per card: need of have | layers on the card, in RAM, on disk | price |"
CASES = (
    ("4xH100-80", None, ()),
    ("4xH100-80", "experts", ()),
    ("4xH100-80", "stages", ()),
    ("1xH100-80+ram=128GB", None, ()),
    ("1xRTX4090+ram=64GB", None, ()),
    ("2xRTX3090,2xT4+ram=160GB", None, ()),
    ("2xRTX3090,2xT4+ram=160GB", None, ("cuda:0", "cuda:1")),
)


def make_shape(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIGS["Qwen3-235B-A22B"]))
    return shape_of(file)


def make_found(shape):
    made = {}

    def of(case):
        if case not in made:
            machine, kind, cards = case
            devices = tuple(DeviceConfig(device=name) for name in cards)
            question = Question(shape, open_machine(machine), ROWS, train=STEP, devices=devices,
                                split=SplitConfig(kind=kind or "auto"))  # fmt: skip
            made[case] = question, forecast(question)
        return made[case]

    return of


@pytest.fixture(scope="session")
def shape(tmp_path_factory):
    return make_shape(tmp_path_factory.mktemp("235b"))


@pytest.fixture(scope="session")
def found(shape):
    return make_found(shape)


def how(made, cards):
    stages = made.split.stages
    if len(made.ranks) == 1:
        return "one card"
    if len(stages) == 1:
        way = "each its own examples" if stages[0].way == "tokens" else "experts and heads divided"
    else:
        way = f"{len(stages)} stages"
    return way + (", without the T4" if cards else "")


def row(case, question, made):
    machine, _, cards = case
    price = sum(d.price.usd_per_hour for k, d in enumerate(question.machine.devices) if not cards or k < len(cards))
    memory = dict.fromkeys(f"{r.need / 1e9:.1f} of {r.have / 1e9:.1f} GB" for r in made.ranks)
    layers = dict.fromkeys(f"{r.on_device}, {r.in_host}, {r.on_disk}" for r in made.ranks)
    hours = made.run_s / 3600
    return (f"| {machine} | {how(made, cards)} | {hours:.2f} | {made.tokens_per_s:,.0f} | {'; '.join(memory)} | {'; '.join(layers)} "
            f"| ${hours * price:.2f} |")  # fmt: skip


def table(found):
    return [HEAD, "|" + "---|" * (HEAD.count("|") - 1), *(row(case, *found(case)) for case in CASES)]


def floors(shape, made):
    """Hours that the seed team's schedule cannot go below, by what its links reach."""
    layers = sum(layer.store_bytes for layer in shape.layers)
    lines = ["| host link of a card | hours of copying, at least |", "|---|---|"]
    for name, rate in (("PCIe 5, pinned, 50 GB/s", 50e9), ("PCIe 4, pinned, 25 GB/s", 25e9), ("unpinned, 6 GB/s", 6e9)):
        floor = offload_floor(layers, 3600, 4, rate, made.run_s)
        lines.append(f"| {name} | {floor.link_s / 3600:.1f} |")
    return lines


def test_the_table_is_what_plans_say(found):
    assert "\n".join(table(found)) in DOC.read_text(), "\n".join(table(found))


def test_the_floor_of_the_other_schedule(shape, found):
    _, made = found(CASES[0])
    assert "\n".join(floors(shape, made)) in DOC.read_text(), "\n".join(floors(shape, made))
    slowest = offload_floor(sum(layer.store_bytes for layer in shape.layers), 3600, 4, 6e9, made.run_s)
    assert made.run_s < slowest.seconds < 26 * 3600


def test_the_models_figures(shape):
    text = DOC.read_text()
    layers = sum(layer.store_bytes for layer in shape.layers)
    assert layers / 1e9 == pytest.approx(120.7, abs=0.05)
    assert layers / 4e9 == pytest.approx(30.2, abs=0.05)
    assert shape.outer_store_bytes / 1e9 == pytest.approx(2.49, abs=0.005)
    assert shape.layers[0].store_bytes / 1e9 == pytest.approx(1.284, abs=0.0005)
    assert shape.total_parameters / 1e9 == pytest.approx(235.1, abs=0.05)
    assert (shape.active_parameters + shape.embedding_parameters) / 1e9 == pytest.approx(22.2, abs=0.05)
    assert shape.parameters["experts"] / shape.total_parameters == pytest.approx(0.966, abs=0.0005)
    assert shape.checkpoint_bytes / 1e9 == pytest.approx(470, abs=0.5)
    sets = {s.name: s for s in alternatives(shape, LoraConfig())}
    default = trainable_set(sites_of(shape, LoraConfig()))
    assert f"{default.total / 1e6:.0f} M parameters, {default.state_bytes / 1e9:.2f} GB" in text
    full = trainable_set(sites_of(shape, LoraConfig(expert_rank=16)))
    assert f"{full.total / 1e9:.2f} B parameters, {full.state_bytes / 1e9:.1f} GB" in text
    attention = sets["attention"]
    assert f"{attention.total / 1e6:.1f} M parameters, {attention.state_bytes / 1e9:.2f} GB" in text


def test_what_the_text_says_of_the_ways(found):
    (_, own), (_, experts), (_, stages), (_, one), (_, rtx), (_, four), (_, two) = (found(case) for case in CASES)
    assert own.step_s < stages.step_s < experts.step_s
    assert all(r.on_device == 94 for r in experts.ranks)
    assert all(r.need < 0.65 * r.have for r in experts.ranks)
    assert one.ranks[0].busy > 0.99
    assert rtx.ranks[0].busy > 0.99
    assert rtx.ranks[0].on_device == 8
    assert two.run_s < four.run_s
    assert any(change.what == "leave out T4" for change in four.helps)
    (share,) = [use.share for name, use in one.played.links.items() if name.startswith("host to")]
    assert re.search(rf"{share:.0%}".replace("%", " %"), DOC.read_text())
    assert 26 * 3600 / own.run_s > 40


def write_tables():
    with tempfile.TemporaryDirectory() as folder:
        shape = make_shape(Path(folder))
    found = make_found(shape)
    text = DOC.read_text()
    for name, lines in (("table", table(found)), ("floor", floors(shape, found(CASES[0])[1]))):
        before, rest = text.split(f"<!-- {name} -->\n")
        text = (
            f"{before}<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- /{name} -->" + rest.split(f"<!-- /{name} -->")[1]
        )
    DOC.write_text(text)


if __name__ == "__main__":
    write_tables()
