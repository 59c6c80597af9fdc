"""Machines named in words, written by hand, measured; and those that contradict themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lamella.errors import UserError
from lamella.hardware import machines
from lamella.hardware.machine import Disk, Host, Machine
from lamella.hardware.machines import open_machine, read_machine

TOML = """
name = "box"
network = "3GB/s"
[[hosts]]
name = "left"
ram = "128GB"
cores = 16
disk_read = "3GB/s"
usd_per_hour = 0.25
[[hosts]]
name = "right"
ram = "64GiB"
[[devices]]
device = "RTX3090"
count = 2
host = "left"
link = "12GB/s"
memory = "24GiB"
tflops = 60
[[devices]]
device = "T4"
host = "right"
reached = 0.5
[[peer_links]]
a = 0
b = 1
rate = "50GB/s"
kind = "nvlink"
"""


def cpu_machine(**host) -> Machine:
    tree = open_machine("1xT4").model_dump()
    tree["devices"][0].update(kind="cpu", name="cpu", memory_bytes=8 << 30, threads=2, reached=1.0)
    tree["hosts"][0].update({"cores": 2, "ram_bytes": 16 << 30, "limit_bytes": 8 << 30, "free_bytes": 4 << 30, **host})
    tree["host_links"] = []
    return Machine.model_validate_json(json.dumps(tree))


def test_devices_of_the_catalogue_in_words():
    machine = open_machine("4xH100-80")
    assert [d.name for d in machine.devices] == ["H100-80"] * 4
    assert (machine.source, machine.taken) == ("catalogue", "2026-11-30")
    assert len(machine.peer_links) == 6 and {link.kind for link in machine.peer_links} == {"nvlink"}
    assert machine.hosts[0].ram_bytes == 4 * 125e9
    assert sum(d.price.usd_per_hour for d in machine.devices) == pytest.approx(4 * 3.99)
    assert all(d.price.source and d.price.date for d in machine.devices)
    told = "\n".join(machine.notes)
    assert "125 GB with each H100-80 (RunPod" in told and "40% of the data sheets" in told and "SXM" in told


def test_unlike_devices_and_what_joins_them():
    machine = open_machine("1xRTX3090,2xT4,1xA6000")
    assert [d.name for d in machine.devices] == ["RTX3090", "T4", "T4", "A6000"]
    kinds = {(link.a, link.b): link.kind for link in machine.peer_links}
    assert kinds[0, 1] == kinds[0, 3] == "host" and kinds[1, 2] == kinds[1, 3] == "pcie"
    assert [link.to_device_bytes_per_s for link in machine.host_links] == [25e9, 12.5e9, 12.5e9, 25e9]


def test_what_is_known_of_the_host_takes_the_place_of_assumptions():
    machine = open_machine("1xH100-80+ram=128GB+disk=3GB/s+cores=26+link=40GB/s+reached=0.5+price=2.5")
    host = machine.hosts[0]
    assert (host.ram_bytes, host.limit_bytes, host.cores) == (128e9, 128e9, 26)
    assert host.disk.read_bytes_per_s == 3e9 and host.price.usd_per_hour == 2.5
    assert machine.devices[0].price is None and machine.devices[0].reached == 0.5
    assert machine.host_links[0].from_device_bytes_per_s == 40e9
    assert [note for note in machine.notes if note.startswith("assumed")] == [
        "assumed: training reaches 50% of the data sheets' matmul rates; +reached=... sets it"
    ]


def test_several_hosts_need_the_network_between_them():
    machine = open_machine("8xH100;8xH100+network=50GB/s")
    assert [d.host for d in machine.devices] == [0] * 8 + [1] * 8
    assert len(machine.peer_links) == 2 * 28 and machine.network_bytes_per_s == 50e9
    with pytest.raises(UserError, match=r"2 hosts, and no rate of the network"):
        open_machine("8xH100;8xH100")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "--machine is empty"),
        ("2xT4,", "a device is missing between commas"),
        ("0xT4", "0 devices"),
        ("1xT4+ram", r"\+'ram' is not known"),
        ("1xT4+speed=3", r"known are \+ram="),
        ("1xT4+ram=1GB+ram=2GB", r"\+ram is given twice"),
        ("1xT4+disk=7GB", "not a rate: '7GB'"),
        ("1xT4+cores=many", r"\+cores=many is not a number"),
        ("1xT4+reached=1.5", "reached = 1.5; it is a share"),
        ("1xT4+price=-1", "a price of -1 dollars"),
        ("4xH200,1xcpu", "measured, not looked up"),
    ],
)
def test_words_that_say_nothing_are_refused(said, told):
    with pytest.raises(UserError, match=told):
        open_machine(said)


def test_a_machine_written_by_hand(tmp_path):
    path = tmp_path / "box.toml"
    path.write_text(TOML)
    machine = open_machine(str(path))
    assert [(d.name, d.host) for d in machine.devices] == [("RTX3090", 0), ("RTX3090", 0), ("T4", 1)]
    first = machine.devices[0]
    assert (first.memory_bytes, first.matmul_flops_per_s) == (24 << 30, 60e12)
    assert machine.devices[2].reached == 0.5
    assert machine.hosts[0].ram_bytes == 128e9 and machine.hosts[1].ram_bytes == 64 << 30
    assert machine.hosts[0].price.usd_per_hour == 0.25 and machine.hosts[0].disk.read_bytes_per_s == 3e9
    assert [(link.a, link.b, link.kind, link.bytes_per_s) for link in machine.peer_links] == [(0, 1, "nvlink", 50e9)]
    assert any("the disk of host 1 reads 7 GB/s" in note for note in machine.notes)


def test_the_example_in_the_module_is_a_machine(tmp_path):
    body = machines.__doc__.split("same and more:")[1]
    (tmp_path / "m.toml").write_text(
        "\n".join(line.strip() for line in body.splitlines()).replace('network = "3GB/s"', "")
    )
    machine = read_machine(tmp_path / "m.toml")
    assert machine.name == "the box under the desk" and len(machine.devices) == 2


def test_the_example_file_is_a_machine():
    machine = open_machine(str(Path(__file__).parent.parent.parent / "examples" / "machine.toml"))
    assert [(d.name, d.host) for d in machine.devices] == [("RTX3090", 0), ("RTX3090", 0), ("A6000", 1)]
    assert machine.devices[2].dequantise_bytes_per_s == pytest.approx(650e9 * 2 / 2.52)
    assert machine.host_links[0].to_device_bytes_per_s == 12e9 and machine.peer_links[0].kind == "nvlink"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("count = 2", "count = = 2", r"box\.toml:15:\d+: not valid TOML"),
        ("cores = 16", "coers = 16", "unknown key `hosts.0.coers`; nearest valid name: `cores`"),
        ("count = 2", "count = 0", "devices.0.count"),
        ('host = "right"', 'host = "middle"', "host 'middle' is not there; hosts are left, right"),
        ('host = "right"', "", "no host given, and there are left, right"),
        ('"128GB"', '"128 apples"', "not a size: '128 apples'"),
        ('device = "T4"', 'device = "T5"', "no device 'T5' in the catalogue; nearest name: 'T4'"),
        ("b = 1\n", "b = 0\n", "link between devices 0 and 0: a link from a device to itself"),
        ("b = 1\n", "b = 7\n", "there is no device 7; devices are 0 to 2"),
        ("tflops = 60", "tflops = 0", "matmul_flops_per_s = 0; a rate is above zero"),
        ("reached = 0.5", "reached = 0", "reached = 0; it is a share"),
        ('network = "3GB/s"', "", "no rate of the network between them"),
        ('rate = "50GB/s"', 'rate = "50"', "not a rate: '50'"),
    ],
)
def test_a_bad_toml_is_refused_once_and_clearly(old, new, told, tmp_path):
    assert old in TOML
    path = tmp_path / "box.toml"
    path.write_text(TOML.replace(old, new, 1))
    with pytest.raises(UserError, match=told):
        open_machine(str(path))


def test_a_measured_machine_comes_back_as_it_was(tmp_path):
    machine = cpu_machine()
    (tmp_path / "machine.json").write_text(machine.model_dump_json())
    assert open_machine(None, folder=tmp_path) == open_machine(str(tmp_path / "machine.json")) == machine


def test_no_machine_says_how_to_get_one(tmp_path):
    with pytest.raises(UserError, match=r"no machine given[\s\S]*lamella probe[\s\S]*--machine"):
        open_machine(None, folder=tmp_path)
    with pytest.raises(UserError, match=r"no such file[\s\S]*lamella probe --out"):
        open_machine(str(tmp_path / "other.json"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"format_version": 1,\n "name" 3}', r"machine\.json:2:9: not valid JSON"),
        ('{"format_version": 9}', "format_version is 9, not 1"),
        ("[]", "format_version is None"),
        ('{"format_version": 1, "name": "a"}', "`hosts` is required"),
    ],
)
def test_a_broken_machine_json_is_refused(text, told, tmp_path):
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(UserError, match=told):
        open_machine(None, folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m["devices"][0].update(host=1), r"is on host 1, and there are 1"),
        (lambda m: m["devices"][0].update(free_bytes=9 << 30), r"9\.66 GB are free of 8\.59 GB"),
        (lambda m: m["devices"][0].update(memory_bytes=12 << 30), r"12\.9 GB of memory, and its host may use 8\.59 GB"),
        (lambda m: m["devices"][0].update(threads=4), "4 threads on 2 cores"),
        (lambda m: m["devices"][0].update(dequantise_bytes_per_s=0.0), "dequantise_bytes_per_s = 0; a rate is above"),
        (lambda m: m["devices"].append(m["devices"][0]), "device 1 .* and device 0 are both the CPU of host 0"),
        (lambda m: m.update(devices=[]), "there is no device"),
        (lambda m: m.update(hosts=[], devices=[]), "there is no host"),
        (lambda m: m["hosts"][0].update(limit_bytes=32 << 30), "memory limit, 34.4 GB, is above its RAM, 17.2 GB"),
        (lambda m: m["hosts"][0].update(free_bytes=17 << 30), "are free of 17.2 GB of RAM"),
        (lambda m: m["hosts"][0].update(cores=0), "0 cores"),
        (lambda m: m["hosts"][0].update(ram_bytes=0, limit_bytes=0), "ram_bytes = 0; a size is above zero"),
        (lambda m: m["hosts"][0]["disk"].update(read_bytes_per_s=-1.0), "disk.*read_bytes_per_s = -1"),
        (lambda m: m["peer_links"].append({"a": 0, "b": 0, "bytes_per_s": 1e9}), "from a device to itself"),
        (
            lambda m: m["host_links"].extend(
                [{"device": 0, "to_device_bytes_per_s": 1e9, "from_device_bytes_per_s": 1e9}] * 2
            ),
            "link of device 0 to its host is given twice",
        ),
        (
            lambda m: m["collectives"].append({"devices": [0, 3], "nbytes": 8, "seconds": 1e-3, "backend": "gloo"}),
            "devices are 0 to 0, each GPU once",
        ),
        (lambda m: m.update(network_latency_s=-1.0), "latency is -1 s"),
    ],
)
def test_contradictions_are_named_with_their_values(change, told, tmp_path):
    tree = json.loads(cpu_machine().model_dump_json())
    change(tree)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=told) as found:
        read_machine(path)
    assert str(path) in str(found.value)


def test_all_contradictions_are_told_at_once(tmp_path):
    tree = json.loads(cpu_machine(cores=0).model_dump_json())
    tree["devices"][0]["reached"] = 2.0
    (tmp_path / "machine.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"0 cores[\s\S]*reached = 2"):
        open_machine(None, folder=tmp_path)


def test_hosts_without_a_known_disk_are_no_contradiction():
    host = Host(name="h", cores=1, ram_bytes=1, limit_bytes=1, disk=Disk(path="/", read_bytes_per_s=1.0))
    assert host.disk.write_bytes_per_s is None


def test_opening_a_machine_imports_no_torch():
    code = "import sys; from lamella.hardware.machines import open_machine; open_machine('4xH100'); print('torch' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"
