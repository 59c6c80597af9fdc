"""Machines written by hand for tests of this room."""

from lamella.hardware.machine import DeviceFacts, Disk, Host, HostLink, Machine, PeerLink, Price


def gpu(name="G80", memory=80e9, flops=900e12, bandwidth=3.35e12, price=2.5, host=0, **more):
    cost = None if price is None else Price(usd_per_hour=price, source="a list", date="2026-11-01")
    return DeviceFacts(
        name=name, kind="cuda", host=host, memory_bytes=int(memory), matmul_flops_per_s=flops, reached=0.5,
        dequantise_bytes_per_s=1e12, memory_bytes_per_s=bandwidth, price=cost, **more,
    )  # fmt: skip


def machine(*devices, ram=512e9, host_price=None, name="test machine"):
    """One host with these devices, all linked alike."""
    price = None if host_price is None else Price(usd_per_hour=host_price, source="a bill", date="2026-11-02")
    host = Host(
        name="box", cores=32, ram_bytes=int(ram), limit_bytes=int(ram), memory_bytes_per_s=1e11, price=price,
        disk=Disk(path=".", read_bytes_per_s=3e9, free_bytes=int(4e12)),
    )  # fmt: skip
    n = len(devices)
    return Machine(
        name=name, source="file", taken="2026-11-30", hosts=(host,), devices=tuple(devices),
        host_links=tuple(HostLink(device=i, to_device_bytes_per_s=25e9, from_device_bytes_per_s=25e9) for i in range(n)),
        peer_links=tuple(PeerLink(a=a, b=b, bytes_per_s=2e11) for a in range(n) for b in range(a + 1, n)),
    )  # fmt: skip
