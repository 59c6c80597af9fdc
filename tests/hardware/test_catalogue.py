"""The catalogue: every figure has a source, names are matched generously, and what is derived follows its formula."""

import datetime

import pytest

from lamella.errors import UserError
from lamella.hardware.catalogue import catalogue


def test_every_figure_has_a_source_that_is_listed():
    known = catalogue()
    assert 30 <= len(known.devices) <= 40
    for device in known.devices:
        figures = set(device.figures())
        assert figures == set(device.sources), device.name
        for figure in figures:
            assert len(known.source_of(device, figure)) > 10


def test_a_price_has_a_day_and_no_day_stands_alone():
    for device in catalogue().devices:
        assert (device.usd_per_hour is None) == (device.price_date is None), device.name
        if device.price_date is not None:
            assert (
                datetime.date(2025, 1, 1)
                < datetime.date.fromisoformat(device.price_date)
                <= datetime.date(2026, 11, 30)
            )


def test_figures_are_of_their_kind():
    for device in catalogue().devices:
        assert 14_000 < device.memory_mib < 200_000, device.name
        assert 40 <= device.tflops <= 2500 and 200 <= device.memory_gb_s <= 8000, device.name
        generation, lanes = device.pcie.split("x")
        assert generation in catalogue().assumed.pcie and lanes in ("8", "16")
        assert device.dtype == ("fp16" if device.name.startswith(("T4", "V100")) else "bf16")


def test_names_and_aliases_mean_one_device_each():
    names = [name for device in catalogue().devices for name in (device.name, *device.aliases)]
    assert len({name.casefold() for name in names}) == len(names)
    for device in catalogue().devices:
        for name in (device.name, *device.aliases, device.name.lower(), f"NVIDIA {device.name}"):
            assert catalogue().find(name) is device, name


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("H100", "H100-80"), ("h100-80gb", "H100-80"), ("H100 PCIe", "H100-PCIe-80"), ("RTX 3090", "RTX3090"),
        ("geforce rtx 3090", "RTX3090"), ("rtx_4090 24GB", "RTX4090"), ("Tesla T4", "T4"), ("A100-SXM4-80GB", "A100-80"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"), ("a6000", "A6000"), ("b200", "B200-180"), ("5080", "RTX5080"),
        ("V100 16 GiB", "V100-16"),
    ],
)  # fmt: skip
def test_names_are_matched_generously(said, name):
    assert catalogue().find(said).name == name


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("A100", "fits several devices: A100-40, A100-PCIe-40, A100-80, A100-PCIe-80"),
        ("V100", "fits several devices: V100-16, V100-32"),
        ("RTX 6000", "fits several devices: RTX6000-Ada, RTX-PRO-6000"),
        ("H1000", "nearest name: 'H100-80'"),
        ("RTX 4090 48GB", "no device 'RTX 4090 48GB'"),
        ("cpu:8", "how fast a CPU trains is measured, not looked up"),
    ],
)
def test_what_fits_several_or_none_is_refused_with_names(said, told):
    with pytest.raises(UserError, match=told):
        catalogue().find(said)


def test_rates_follow_from_the_figures():
    known = catalogue()
    a100 = known.find("A100-80")
    facts = known.facts(a100)
    assert facts.memory_bytes == 81920 << 20
    assert facts.matmul_flops_per_s * facts.reached == pytest.approx(312e12 * 0.4)
    assert facts.dequantise_bytes_per_s == pytest.approx(2039e9 * 0.8 * 2 / 2.52)
    assert known.link_rate(a100) == (25e9, "pcie")
    assert known.peer_rate(a100, a100) == (pytest.approx(0.8 * 300e9), "nvlink")
    t4, small = known.find("T4"), known.find("RTX4060Ti-16")
    assert known.link_rate(small) == (12.5e9, "pcie")
    assert known.peer_rate(t4, a100) == (12.5e9, "pcie")
    assert known.peer_rate(small, t4) == (6.25e9, "host")
    assert known.link_rate(known.find("GH200"))[1] == "c2c"
