"""Two network namespaces as two hosts, joined by one link whose rate is set and which can be cut."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

_CLONE_NEWNET = 0x40000000


def enter(name: str) -> None:
    """Move this thread, and threads it starts, into a named network namespace (`os.setns` came with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """`names`: their namespaces; `addresses`: by host; `device`: the link's network interface in both."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    device: str
    rate: str

    def env(self, world: int, rank: int, port: int) -> dict[str, str]:
        """A rank's environment; rank 0's host holds the store."""
        return {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1", "RANK": str(rank), "LOCAL_RANK": "0",
                "MASTER_ADDR": self.addresses[0], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": self.device}  # fmt: skip

    def shape(self, rate: str) -> None:
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", self.device, "root", "tbf", "rate", rate, "burst", "64kb",
                 "latency", "100ms")  # fmt: skip

    def cut(self) -> None:
        """From now on all packets are lost; neither host is told (a bucket smaller than any packet)."""
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", self.device, "root", "tbf", "rate", "8kbit", "burst", "10",
                 "latency", "1ms")  # fmt: skip

    def mend(self) -> None:
        self.shape(self.rate)


@contextmanager
def two_hosts(rate: str = "200mbit") -> Iterator[Hosts]:
    """Skips the test where namespaces or shaped links are not allowed."""
    a, b = (f"lamella-{os.getpid()}-{x}" for x in "ab")
    hosts = Hosts((a, b), ("10.77.0.1", "10.77.0.2"), "link0", rate)
    try:
        try:
            for name in hosts.names:
                _run("ip", "netns", "add", name)
            _run("ip", "-n", a, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", b)
            for name, address in zip(hosts.names, hosts.addresses, strict=True):
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "link0")
                _run("ip", "-n", name, "link", "set", "link0", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
            hosts.mend()
        except FileNotFoundError as error:
            pytest.skip(f"no command {error.filename}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces with shaped links are not allowed here: {error.stderr.strip()}")
        yield hosts
    finally:
        for name in hosts.names:
            with suppress(subprocess.CalledProcessError, FileNotFoundError):
                _run("ip", "netns", "del", name)
