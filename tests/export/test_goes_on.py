"""Training goes on from an adapter of any layout."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.adapter import Adapter
from lamella.config import build_run_config
from lamella.errors import UserError
from lamella.export.adapters import export_adapter
from lamella.ranks.group import Ranks
from lamella.train.assemble import _open_adapter, assemble_parts


def test_training_goes_on_from_an_exported_layout_and_the_receipt_says_so(run, tmp_path):
    run_dir, _ = run
    export_adapter(run_dir, tmp_path / "mlx", "mlx")
    tree = json.loads((run_dir / "config.json").read_text()) | {"init_adapter": str(tmp_path / "mlx"), "name": "second"}
    parts = assemble_parts(build_run_config(tree), Ranks(0, 1), True)
    given = load_file(run_dir / "adapter_model.safetensors")
    for key in parts.adapter.adapter.sites:
        a, b = parts.adapter.adapter.pair(key)
        assert torch.equal(a, given[f"base_model.model.{key}.lora_A.weight"])
        assert torch.equal(b, given[f"base_model.model.{key}.lora_B.weight"])
    assert not parts.fresh
    assert parts.started_from["layout"] == "mlx"
    assert len(parts.started_from["xxh3_128"]) == 32
    parts.engine.close()


def test_experts_of_several_ranks_are_filled_up_with_fresh_a_and_zero_b(exported, tmp_path):
    base, places, _, _, _ = exported("olmoe")
    tensors = {}
    for place in places.values():
        if place.parameter is None:
            continue
        for e in range(place.experts):
            for leaf in place.leaves:  # gate and up with an A of their own: rank 4 together, down has 2
                name = f"base_model.model.{place.source}.{e}.{leaf}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(2, place.inputs)
                tensors[f"{name}.lora_B.weight"] = torch.randn(place.outputs // len(place.leaves), 2)
    folder = tmp_path / "given"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    lora = {"rank": 4, "alpha": 8, "expert_rank": 4, "targets": ["experts"]}
    tree = {"store": str(base.path), "init_adapter": str(folder), "lora": lora}
    adapter = _open_adapter(build_run_config(tree), base.skeleton, Ranks(0, 1))
    given = Adapter.load(folder, base.skeleton)
    assert {site.rank for site in given.sites.values()} == {2, 4}
    for key, site in adapter.sites.items():
        (a, b), (theirs_a, theirs_b) = adapter.pair(key), given.pair(key)
        assert site.scale == given.sites[key].scale == 2
        assert torch.allclose(b @ a, theirs_b @ theirs_a, rtol=1e-5, atol=1e-5)
        rank = given.sites[key].rank
        assert a[:, rank:].abs().sum() > 0 or rank == 4
        assert not b[..., rank:].any()
    with pytest.raises(UserError, match="init_adapter has rank 4"):
        _open_adapter(
            build_run_config({**tree, "lora": {**lora, "expert_rank": 2, "alpha": 4, "rank": 2}}),
            base.skeleton,
            Ranks(0, 1),
        )
