"""What an adapter began with: the same told from its values and from values made again."""

import pytest
import torch
import xxhash

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.models.skeleton import Skeleton, load_config
from lamella.train.state import Start, digests, unit_names, units
from tests.fixtures import moe_config


@pytest.fixture
def adapter(made):
    store, _ = made(moe_config(layers=2))
    return Adapter.create(Skeleton(load_config(store.path), torch.float32), LoraConfig(rank=4), 3)


def class_of(name):
    return "experts" if ".experts." in name else "attention"


def test_units_have_their_own_checksums(adapter):
    parameters = adapter.parameters()
    found = digests(parameters, class_of)
    assert list(found) == unit_names(parameters, class_of)
    assert any(name.endswith("[3]") for name in found)
    for name, p in parameters.items():
        for unit, part in units(name, p.detach(), class_of(name)).items():
            assert found[unit] == xxhash.xxh3_128_hexdigest(part.numpy().tobytes())


def test_values_made_again_are_those_of_the_start(adapter):
    parameters = adapter.parameters()
    plain, now, later = (
        Start(parameters, class_of),
        Start(parameters, class_of, adapter),
        Start(parameters, class_of, adapter, later=True),
    )
    names = list(parameters)
    with torch.no_grad():
        for name in names[:3]:
            parameters[name] += 1
    assert plain.digests() == now.digests() == later.digests()
    assert plain.zero == now.zero == later.zero == tuple(name for name in names if name.endswith("lora_B"))
    assert now.checksum == later.checksum
    trained = digests(parameters, class_of)
    assert {name for name in trained if trained[name] != later.digests()[name]} == {
        unit for unit in unit_names({name: parameters[name] for name in names[:3]}, class_of)
    }


def test_another_seed_is_another_start(adapter):
    before = Start(adapter.parameters(), class_of, adapter).checksum
    assert before == Start(adapter.parameters(), class_of, adapter, later=True).checksum
    adapter.reset(4)
    assert Start(adapter.parameters(), class_of, adapter).checksum != before
