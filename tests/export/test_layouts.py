"""Layouts of adapters: every way there and back gives the same bits; axes against the engines' own formulas."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.adapter.layouts import LAYOUTS
from lamella.adapter.read import AdapterFile
from lamella.errors import UserError
from lamella.export.adapters import export_adapter, write_layout
from tests.export.conftest import write

MODELS = ("llama", "qwen3_moe-dense-first", "mixtral", "gpt_oss")


def config_of(file):
    return json.loads((file.folder / "adapter_config.json").read_text())


@pytest.mark.parametrize("model", MODELS)
def test_every_ordered_pair_of_layouts_round_trips_bit_for_bit(model, exported, tmp_path):
    base, places, names, files, ours = exported(model)
    for name, file in files.items():
        assert list(file.sites) == list(ours.sites)
        for key, site in ours.sites.items():
            assert (file.sites[key].rank, file.sites[key].alpha) == (site.rank, site.alpha)
            assert all(torch.equal(x, y) for x, y in zip(file.pair(key), ours.pair(key), strict=True)), (name, key)
    for x, y in itertools.permutations(LAYOUTS, 2):
        there = write(LAYOUTS[y], files[x], places, tmp_path / f"{x}-{y}", base, names)
        back = write(LAYOUTS[x], there, places, tmp_path / f"{x}-{y}-{x}", base, names)
        first, again = load_file(files[x].path), load_file(back.path)
        assert first.keys() == again.keys()
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert config_of(files[x]) == config_of(back)


# ---- axes: the weights' deltas as each engine makes them of the file


def deltas(layout, file, place, rank, base):
    """[E, out, in] (or [out, in]) of a site from the file's tensors alone."""
    t, config = load_file(file.path), config_of(file)
    if layout == "mlx":
        scale = config["lora_parameters"]["scale"]
        if place.parameter is None:
            return scale * (t[f"{place.source}.lora_a"] @ t[f"{place.source}.lora_b"]).T
        around = (
            place.source
            if base.skeleton.config.model_type == "gpt_oss"
            else place.source.replace("experts", "switch_mlp")
        )
        rows = [scale * t[f"{around}.{leaf}.lora_b"] @ t[f"{around}.{leaf}.lora_a"] for leaf in place.generic]
        return stacked(rows, place)
    fused = layout in ("peft", "peft-0.18", "unsloth", "vllm-3d")
    r = rank if fused and layout != "vllm-3d" else config["r"]
    alpha = next((v for k, v in config.get("alpha_pattern", {}).items() if place.key.endswith(k)), config["lora_alpha"])
    scale = alpha / (math.sqrt(r) if config["use_rslora"] else r)
    module = f"base_model.model.{place.module if layout in ('peft', 'peft-0.18', 'unsloth') else place.source}"
    if place.parameter is None:
        return scale * t[f"{module}.lora_B.weight"] @ t[f"{module}.lora_A.weight"]
    if not fused:
        rows = [
            torch.stack([
                scale * t[f"{module}.{e}.{leaf}.lora_B.weight"] @ t[f"{module}.{e}.{leaf}.lora_A.weight"]
                for e in range(place.experts)
            ])
            for leaf in place.leaves
        ]  # fmt: skip
        return stacked(rows, place)
    wrapper = module + (".base_layer" if place.parameter == "gate_up_proj" else "")
    a, b = t[f"{wrapper}.lora_A.weight"], t[f"{wrapper}.lora_B.weight"]
    a_Eri = a.reshape(place.experts, -1, a.shape[1])
    if layout == "unsloth":
        delta = torch.einsum("oer,eri->eoi", b.reshape(b.shape[0], place.experts, -1), a_Eri)
    else:
        delta = torch.einsum("ore,eri->eoi", b.reshape(b.shape[0], -1, place.experts), a_Eri)
    if layout == "peft-0.18" and not place.transposed:
        delta = delta.transpose(1, 2)
    return scale * delta


def stacked(rows, place):
    if len(rows) == 1:
        return rows[0]
    if place.halves == "interleaved":
        return torch.stack(rows, 2).flatten(1, 2)
    return torch.cat(rows, 1)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b76_every_layout_gives_the_weights_their_deltas(layout, rslora, exported):
    for model in ("mixtral", "gpt_oss", "olmoe"):
        base, places, _, files, ours = exported(model, rslora)
        for key, site in ours.sites.items():
            a, b = ours.pair(key)
            wanted = site.scale * b.detach() @ a.detach()
            assert torch.allclose(
                deltas(layout, files[layout], places[key], site.rank, base), wanted, rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize(("rslora", "scale"), [(False, 0.5), (True, 2.0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b76_rank_16_alpha_8(layout, rslora, scale, exported, tmp_path):
    base, places, names, _, ours = exported("llama")
    folder = tmp_path / "b76"
    folder.mkdir()
    tensors = {}
    for key, site in ours.sites.items():
        tensors[f"base_model.model.{key}.lora_A.weight"] = torch.full((16, site.inputs), 0.01)
        tensors[f"base_model.model.{key}.lora_B.weight"] = torch.full((site.outputs, 16), 0.01)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "use_rslora": rslora, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    file = write(
        LAYOUTS[layout], AdapterFile(folder, base.skeleton, names=names), places, tmp_path / "out", base, names
    )
    assert {site.scale for site in file.sites.values()} == {scale}
    there = config_of(file)
    if layout == "mlx":
        assert there["lora_parameters"]["scale"] == scale
    elif LAYOUTS[layout].rslora:
        assert (there["lora_alpha"], there["r"], there["use_rslora"]) == (8, 16, rslora)
    else:
        assert (there["lora_alpha"], there["r"], there["use_rslora"]) == (32 if rslora else 8, 16, False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", ["no alpha", "rank 0"])
def test_b76_missing_alpha_and_rank_0_are_errors(layout, fault, exported, tmp_path):
    base, _, names, files, _ = exported("mixtral")
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in files[layout].folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = config_of(files[layout])
    where = config["lora_parameters"] if layout == "mlx" else config
    key = {"no alpha": "scale" if layout == "mlx" else "lora_alpha", "rank 0": "rank" if layout == "mlx" else "r"}[
        fault
    ]
    where[key] = None if fault == "no alpha" else 0
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{key} is"):
        AdapterFile(folder, base.skeleton, names=names)


def test_ranks_and_scales_that_differ_by_site_are_kept_or_folded(exported, tmp_path):
    base, places, names, files, _ = exported("llama")
    tensors = load_file(files["peft"].path)
    odd = "model.layers.1.self_attn.q_proj"
    for x, dim in (("A", 0), ("B", 1)):
        name = f"base_model.model.{odd}.lora_{x}.weight"
        tensors[name] = torch.cat([tensors[name], torch.randn_like(tensors[name])], dim)
    folder = tmp_path / "odd"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {**config_of(files["peft"]), "rank_pattern": {odd: 8}, "alpha_pattern": {odd: 64}}  # scale 8, the others 2
    (folder / "adapter_config.json").write_text(json.dumps(config))
    file = AdapterFile(folder, base.skeleton, names=names)
    assert (file.sites[odd].rank, file.sites[odd].scale) == (8, 8.0)
    a, b = file.pair(odd)
    for name, layout in LAYOUTS.items():
        out = tmp_path / name
        there = write(layout, file, places, out, base, names)
        assert all(torch.equal(x, y) for x, y in zip(there.pair(odd), (a, b), strict=True))  # 4 is a power of two
        (out / "lamella_adapter.json").unlink()  # as an engine reads it
        if layout.experts != "fused" or layout.names == "model":
            plain = AdapterFile(out, base.skeleton, "vllm" if name == "sglang" else name, names)
            pa, pb = plain.pair(odd)
            assert torch.allclose(plain.sites[odd].scale * pb @ pa, 8.0 * b @ a, rtol=1e-6, atol=1e-8)
    back = write(LAYOUTS["peft"], file, places, tmp_path / "again", base, names)
    assert config_of(back)["rank_pattern"] == {odd: 8}
    assert config_of(back)["alpha_pattern"] == {odd: 64.0}


def test_sglang_gets_all_of_q_k_v(exported, tmp_path):
    base, places, names, files, _ = exported("llama")
    tensors = {k: v for k, v in load_file(files["peft"].path).items() if "v_proj" in k}
    folder = tmp_path / "v"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config_of(files["peft"])))
    file = AdapterFile(folder, base.skeleton, names=names)
    out = tmp_path / "sglang"
    out.mkdir()
    _, count, notes = write_layout(LAYOUTS["sglang"], file, places, out, base)
    assert count == 3 * len(tensors)
    assert "pairs of zeros added" in notes[0]
    assert not any(
        load_file(out / "adapter_model.safetensors")[k].any()
        for k in load_file(out / "adapter_model.safetensors")
        if "q_proj" in k
    )
    assert list(AdapterFile(out, base.skeleton, names=names).sites) == list(file.sites)


def test_an_unknown_layout_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no adapter layout 'vlm'"):
        export_adapter(tmp_path, tmp_path / "out", "vlm")
