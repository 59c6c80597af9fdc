"""From a question to a forecast: what is chosen fits and is the fastest of what was looked at, and what is told holds."""

import json
from dataclasses import replace

import pytest

from lamella.config import ComputeConfig, DeviceConfig, LoraConfig, MemoryConfig, SplitConfig, TrainConfig
from lamella.errors import UserError
from lamella.forecast.describe import shape_of
from lamella.forecast.forecast import Question, forecast
from lamella.forecast.rows import given_rows
from lamella.hardware.machine import DeviceFacts, Disk, Host, Machine
from lamella.hardware.machines import open_machine
from tests.checkpoint.published import CONFIGS

ROWS = given_rows(400, 2048, 2048)
STEP = TrainConfig(tokens_per_step=16384)


@pytest.fixture(scope="session")
def shape(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("configs"), {}

    def of(name):
        if name not in made:
            file = folder / f"{name}.json"
            file.write_text(json.dumps(CONFIGS[name]))
            made[name] = shape_of(file)
        return made[name]

    return of


def cpu(memory_bytes=16 * 10**9, threads=4, disk=2e9):
    return Machine(
        name="box", source="file", taken="2026-11-30",
        hosts=(Host(name="box", cores=threads, ram_bytes=memory_bytes, limit_bytes=memory_bytes,
                    disk=Disk(path=".", read_bytes_per_s=disk, free_bytes=10**12)),),
        devices=(DeviceFacts(name="cores", kind="cpu", memory_bytes=memory_bytes, matmul_flops_per_s=1e12, reached=0.5,
                             dequantise_bytes_per_s=2e10, memory_bytes_per_s=2e10, threads=threads),),
    )  # fmt: skip


@pytest.mark.parametrize("machine", ["8xH100-80", "1xRTX4090+ram=64GB", "2xRTX3090,1xA6000+ram=256GB"])
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Gemma-3-27B", "DeepSeek-V3", "Qwen3-Next-80B-A3B"])
def test_every_figure_of_a_forecast_is_there_and_adds_up(shape, name, machine):
    question = Question(shape(name), open_machine(machine), ROWS, train=STEP)
    found = forecast(question)
    layers = len(question.shape.layers)
    assert sorted(i for r in found.ranks if r.share == 1 or r.rank == found.split.stages[found.split.stage_of(r.rank)].ranks[0]
                  for i in range(r.first, r.last)) == list(range(layers))  # fmt: skip
    for rank in found.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.need, abs=10)
        assert rank.on_device + rank.in_host + rank.on_disk == rank.last - rank.first
        assert 0 <= rank.idle <= 1 + 1e-9
        assert sum(rank.seconds.values()) + sum(rank.wait_s.values()) == pytest.approx(
            found.played.step_s, rel=0.02, abs=1e-3
        )
    assert found.fits == (not found.shortfall)
    assert any("36 of 48 layers mix tokens by other means" in n for n in found.notes) == (name == "Qwen3-Next-80B-A3B")
    assert found.run_s == pytest.approx(found.start_s + found.steps * found.step_s)
    assert found.tokens_per_s * found.step_s == pytest.approx(found.step_tokens)
    assert sum(part.seconds for part in found.played.bottleneck) == pytest.approx(found.played.step_s)
    assert 0 < found.utilisation < 0.5  # data sheets' rates: 40 % is taken to be reached
    if found.fits:
        assert all(rank.fits for rank in found.ranks)
        assert all(r.step_s is None or r.step_s >= found.played.step_s * (1 - 1e-9) or "leaves out" in r.why
                   for r in found.rejected)  # fmt: skip
    else:
        assert found.changes


def test_what_is_settled_gives_the_same_forecast(shape):
    """A plan's settings, asked for, are the plan."""
    for machine in ("1xRTX4090+ram=64GB", "4xH100-80"):
        question = Question(shape("Qwen3-30B-A3B"), open_machine(machine), ROWS, train=STEP)
        first = forecast(question)
        settled = first.settled
        asked = replace(
            question, memory=MemoryConfig(**settled["memory"]), compute=ComputeConfig(**settled["compute"]),
            devices=tuple(DeviceConfig(**entry) for entry in settled.get("devices", ())),
            split=SplitConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in settled.get("split", {}).items()}),
        )  # fmt: skip
        again = forecast(asked)
        assert again.split.stages == first.split.stages
        assert again.step_s == pytest.approx(first.step_s, rel=0.02)
        assert [r.need for r in again.ranks] == pytest.approx([r.need for r in first.ranks], rel=0.02)


def test_a_cpu_without_room_streams_and_says_with_which_budget(shape):
    roomy = forecast(Question(shape("Qwen3-8B"), cpu(64 * 10**9, disk=1e6), ROWS, train=STEP))
    tight = forecast(Question(shape("Qwen3-8B"), cpu(18 * 10**9, disk=1e6), ROWS, train=STEP))
    assert roomy.fits
    assert roomy.ranks[0].on_disk == 0
    assert "budget" not in roomy.settled["memory"]
    assert tight.fits
    assert tight.ranks[0].on_disk > 0
    assert tight.ranks[0].need <= tight.ranks[0].have
    assert tight.settled["memory"]["budget"].endswith("B")
    assert tight.step_s > roomy.step_s
    assert any("RAM" in change.what and change.times > 1.1 for change in tight.helps)


def test_the_adapters_state_is_counted_to_the_byte(shape):
    """4 bytes a value and 8 of moments; one copy in bf16: of all layers where graphs are kept, else of one."""
    for recompute in ("always", "never"):
        asked = MemoryConfig(recompute=recompute)
        found = forecast(Question(shape("Qwen3-0.6B"), cpu(200 * 10**9), ROWS, train=STEP, memory=asked))
        trained = sum(site.parameters for site in found.sites)
        copied = trained if recompute == "never" else trained // 28
        assert found.ranks[0].parts["optimizer"] == 8 * trained
        assert found.ranks[0].parts["adapter"] == 4 * trained + 2 * copied


def test_what_does_not_fit_names_need_and_have_and_the_change_does_it(shape):
    question = Question(shape("Qwen3-8B"), cpu(7 * 10**9), ROWS, train=STEP)
    found = forecast(question)
    assert not found.fits
    assert "need" in found.shortfall[0]
    assert "have" in found.shortfall[0]
    name, _, value = found.changes[0].what.partition(" = ")
    section, _, key = name.partition(".")
    assert section == "train"
    changed = replace(question, train=STEP.model_copy(update={key: int(value)}))
    assert forecast(changed).fits
    more = next(c.what for c in found.changes if c.what.startswith("+"))
    assert "cores" in more


def test_a_device_that_cannot_hold_its_part_is_left_out_by_name(shape):
    machine = open_machine("2xH100-80,1xRTX4090+ram=512GB")
    question = Question(
        shape("DeepSeek-V3"), machine, given_rows(64, 4096, 4096), train=TrainConfig(tokens_per_step=32768)
    )
    found = forecast(question)
    assert not found.fits
    assert all("RTX4090" in line for line in found.shortfall)
    assert found.changes[0].what == "leave out RTX4090"
    without = replace(question, devices=(DeviceConfig(device="cuda:0"), DeviceConfig(device="cuda:1")))
    assert forecast(without).fits


def test_cards_without_bf16_train_in_fp32(shape):
    found = forecast(Question(shape("Qwen3-0.6B"), open_machine("1xT4"), ROWS, train=STEP))
    assert found.dtype == "fp32"
    assert any("no bf16" in note for note in found.notes)
    with pytest.raises(UserError, match="underflow"):
        forecast(
            Question(shape("Qwen3-0.6B"), open_machine("1xT4"), ROWS, train=STEP, compute=ComputeConfig(dtype="fp16"))
        )


def test_more_of_everything_never_takes_longer(shape):
    """Twice the layers' rates, links and disk: at most as long; twice the tokens: no shorter."""
    base = forecast(Question(shape("Qwen3-30B-A3B"), open_machine("1xRTX4090+ram=16GB+disk=2GB/s"), ROWS, train=STEP))
    disk = forecast(Question(shape("Qwen3-30B-A3B"), open_machine("1xRTX4090+ram=16GB+disk=4GB/s"), ROWS, train=STEP))
    ram = forecast(Question(shape("Qwen3-30B-A3B"), open_machine("1xRTX4090+ram=64GB+disk=2GB/s"), ROWS, train=STEP))
    more = forecast(Question(shape("Qwen3-30B-A3B"), open_machine("1xRTX4090+ram=16GB+disk=2GB/s"), ROWS,
                             train=TrainConfig(tokens_per_step=32768)))  # fmt: skip
    assert disk.step_s <= base.step_s
    assert ram.step_s <= base.step_s
    assert more.step_s >= base.step_s


def test_attention_alone_is_cheaper_than_experts_too(shape):
    everything = Question(shape("Qwen3-30B-A3B"), open_machine("1xH100-80"), ROWS, train=STEP)
    attention = replace(everything, lora=LoraConfig(targets=("q_proj", "k_proj", "v_proj", "o_proj")))
    a, b = forecast(attention), forecast(everything)
    assert sum(s.parameters for s in a.sites) < sum(s.parameters for s in b.sites)
    assert a.hosts[0].ram["adapter state"] < b.hosts[0].ram["adapter state"]
    assert a.step_s < b.step_s


def test_ranks_that_the_machine_does_not_have_are_refused(shape):
    machine = open_machine("2xRTX3090")
    for devices, said in (
        ((DeviceConfig(device="cuda:2"),), "has 2 GPUs"),
        ((DeviceConfig(device="cuda"),) * 3, "has 2"),
        ((DeviceConfig(device="cpu"), DeviceConfig(device="cuda")), "only GPUs are known"),
        ((DeviceConfig(device="tpu"),), "no device"),
    ):
        with pytest.raises(UserError, match=said):
            forecast(Question(shape("Qwen3-0.6B"), machine, ROWS, train=STEP, devices=devices))
    with pytest.raises(UserError, match="more than the"):
        forecast(Question(shape("Qwen3-0.6B"), cpu(), ROWS, train=STEP, memory=MemoryConfig(budget="20GB")))
