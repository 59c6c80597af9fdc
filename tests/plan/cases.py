"""Models, devices and rows for the tests of the plan."""

from lamella.plan.costs import LayerCost, ModelCost, RowCost
from lamella.plan.devices import Device, Link, Links

GB = 10**9
FAST = Links(Link(50e9, 1e-6), Link(10e9, 1e-5))


def layer(**given):
    values = dict(flops_per_token=1e9, flops_per_pair=1e3, forward_share=1 / 3, packed_bytes=100_000_000,
                  dequantised_bytes=0, adapter_bytes=1_600_000, activation_bytes_per_token=50_000.0,
                  boundary_bytes_per_token=8192, divisible=0.0)  # fmt: skip
    return LayerCost(**{**values, **given})


def model(layers=24, head=1e8, first=0, last=0, **given):
    return ModelCost((layer(**given),) * layers, head, first, last)


def devices(*speeds, host="a", memory=None, read=25e9, dequantise=1e12, unit=1e13):
    return [Device(f"d{k}", host, unit * speed, dequantise, read, memory) for k, speed in enumerate(speeds)]


def random_rows(rng, count, low=100, high=2000):
    return [RowCost(tokens := rng.randint(low, high), tokens // 4) for _ in range(count)]
