"""Adapters of other tools: which layout they have, what they may hold, where they belong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.adapter import Adapter
from lamella.adapter.peft_format import load_adapter
from lamella.adapter.read import AdapterFile
from lamella.errors import UserError

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]}


def folder_of(path, tensors, config):
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def foreign(path, file, **config):
    """The file without what we say of it."""
    own = json.loads((file.folder / "adapter_config.json").read_text())
    for key in [k for k, v in config.items() if v is None]:
        own.pop(key, None)
    return folder_of(path, load_file(file.path), {**own, **{k: v for k, v in config.items() if v is not None}})


@pytest.mark.parametrize(
    ("model", "written", "config", "how"),
    [
        ("qwen3_moe-dense-first", "peft", {"peft_version": "0.21.2"}, "peft_version 0.21"),
        ("qwen3_moe-dense-first", "peft-0.18", {"peft_version": "0.18.1"}, "peft_version 0.18"),
        ("qwen3_moe-dense-first", "peft", {"peft_version": None}, "shapes"),
        ("qwen3_moe-dense-first", "peft-0.18", {"peft_version": None}, "shapes"),
        ("olmoe", "peft-0.18", {"peft_version": "0.18.0"}, "peft_version 0.18"),
        ("gpt_oss", "peft", {"peft_version": None}, "shapes"),
        ("qwen3_moe-dense-first", "unsloth", {"peft_version": None}, "unsloth_fixed"),
        ("gpt_oss", "unsloth", {}, "unsloth_fixed"),
        ("mixtral", "vllm", {}, "single experts"),
        ("olmoe", "vllm", {}, "single experts"),
    ],
)
def test_layouts_are_told_by_keys_versions_marks_and_shapes(model, written, config, how, exported, tmp_path):
    base, _, names, files, ours = exported(model)
    file = AdapterFile(foreign(tmp_path / "foreign", files[written], **config), base.skeleton, names=names)
    assert file.layout.name == written
    assert how in file.how
    for key, site in ours.sites.items():
        a, b = (p.detach() for p in ours.pair(key))
        there_a, there_b = file.pair(key)
        assert torch.equal(there_a, a)
        assert torch.equal(there_b, b)
        assert file.sites[key].scale == pytest.approx(site.scale)


def test_unsloth_on_peft_018_has_the_roles_swapped(exported, tmp_path):
    base, _, names, files, ours = exported("qwen3_moe-dense-first")
    tensors = load_file(files["unsloth"].path)
    for name in [n for n in tensors if "experts" in n and "lora_A" in n]:
        other = name.replace("lora_A", "lora_B")
        a, b = tensors[name], tensors[other]
        tensors[name], tensors[other] = b.T.contiguous(), a.T.contiguous()  # both orders are expert-major
    config = json.loads((files["unsloth"].folder / "adapter_config.json").read_text())
    for version in ("0.18.1", None):
        folder = folder_of(tmp_path / f"u{version}", tensors, {**config, "peft_version": version})
        file = AdapterFile(folder, base.skeleton, names=names)
        for key in ours.sites:
            assert all(torch.equal(x, y) for x, y in zip(file.pair(key), ours.pair(key), strict=True))


def test_square_experts_without_a_version_are_refused(exported, tmp_path):
    base, _, names, files, _ = exported("olmoe")
    only = {k: v for k, v in load_file(files["peft"].path).items() if "base_layer" in k}  # gate_up: 64 in, 64 out
    own = json.loads((files["peft"].folder / "adapter_config.json").read_text())
    own.pop("peft_version")
    folder = folder_of(tmp_path / "square", {k.replace(".base_layer", ""): v for k, v in only.items()}, own)
    with pytest.raises(UserError, match="both fit the shapes") as caught:
        AdapterFile(folder, base.skeleton, names=names)
    assert "peft_version" in caught.value.fix


def test_gate_and_up_with_different_a_become_one_pair_of_twice_the_rank(exported, tmp_path):
    for model, leaves in (
        ("olmoe", ("gate_proj", "up_proj")),
        ("gpt_oss", ("gate_proj", "up_proj")),
        ("mixtral", ("w1", "w3")),
    ):
        base, places, names, _, _ = exported(model)
        place = places["model.layers.1.mlp.experts.gate_up_proj"]
        half, tensors, wanted = place.outputs // 2, {}, torch.zeros(place.experts, place.outputs, place.inputs)
        generator = torch.Generator().manual_seed(3)
        for e in (0, 2):  # the others have no pair
            parts = []
            for leaf in leaves:
                a, b = torch.randn(2, place.inputs, generator=generator), torch.randn(half, 2, generator=generator)
                name = f"base_model.model.{place.source}.{e}.{leaf}"
                tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
                parts.append(2.0 * b @ a)
            wanted[e] = torch.stack(parts, 1).flatten(0, 1) if model == "gpt_oss" else torch.cat(parts)
        file = AdapterFile(folder_of(tmp_path / model, tensors, CONFIG), base.skeleton, names=names)
        (site,) = file.sites.values()
        a, b = file.pair(site.key)
        assert (site.rank, site.scale) == (4, 2.0)
        assert torch.allclose(site.scale * b @ a, wanted, rtol=1e-6, atol=1e-6)
        assert any("different A" in note for note in file.notes)


def test_only_gate_adapted_leaves_up_as_it_is(exported, tmp_path):
    base, places, names, _, _ = exported("gpt_oss")
    place = places["model.layers.0.mlp.experts.gate_up_proj"]
    name = f"base_model.model.{place.source}.1.gate_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(2, place.inputs),
        f"{name}.lora_B.weight": torch.randn(place.outputs // 2, 2),
    }
    file = AdapterFile(folder_of(tmp_path / "gate", tensors, CONFIG), base.skeleton, names=names)
    a, b = file.pair(place.key)
    delta = b @ a
    assert torch.equal(delta[1, 0::2], tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"])
    assert not delta[1, 1::2].any()
    assert not delta[0].any()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base_model.model.lm_head.weight", (512, 64)),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", (64, 64)),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (2, 512)),
        ("base_model.model.lm_head.lora_A.weight", (2, 64)),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", (64,)),
    ],
)
def test_b70_what_no_server_takes_needs_a_merge(name, shape, exported, tmp_path):
    base, _, names, files, _ = exported("llama")
    tensors = {**load_file(files["peft"].path), name: torch.zeros(shape)}
    folder = folder_of(
        tmp_path / "b70", tensors, json.loads((files["peft"].folder / "adapter_config.json").read_text())
    )
    with pytest.raises(UserError, match="LoRA") as caught:
        AdapterFile(folder, base.skeleton, names=names)
    assert name.removesuffix(".lora_A.weight").removeprefix("base_model.model.") in caught.value.what
    assert "merge_and_unload" in caught.value.fix


@pytest.mark.parametrize(
    ("key", "value"),
    [("modules_to_save", ["lm_head"]), ("bias", "all"), ("use_dora", True), ("init_lora_weights", "pissa"),
     ("trainable_token_indices", [1, 2]), ("rank_pattern", {"q_proj": 0}), ("r", 2.5)],
)  # fmt: skip
def test_b70_settings_beyond_pairs_are_refused(key, value, exported, tmp_path):
    base, _, names, files, _ = exported("llama")
    folder = foreign(tmp_path / "b70", files["peft"], **{key: value})
    with pytest.raises(UserError, match=key):
        AdapterFile(folder, base.skeleton, names=names)


def test_b71_matched_modules_are_counted(exported, tmp_path):
    base, _, names, files, _ = exported("llama")
    tensors, config = (
        load_file(files["peft"].path),
        json.loads((files["peft"].folder / "adapter_config.json").read_text()),
    )
    wrapped = {k.replace("model.layers", "model.language_model.layers"): v for k, v in tensors.items()}
    part = {k.replace("layers.1", "language_model.layers.1"): v for k, v in tensors.items()}
    for given, count in ((wrapped, "0 of 14"), (part, "7 of 14")):
        folder = folder_of(tmp_path / count.replace(" ", "-"), given, config)
        with pytest.raises(UserError, match=f"{count} modules exist") as caught:
            AdapterFile(folder, base.skeleton, names=names)
        assert caught.value.what.count("language_model.layers") == 3
        assert caught.value.what.count("'model.layers") == 3  # both sides


def test_b71_targets_that_are_not_allowed_are_an_error(exported, tmp_path):
    base, _, _, files, _ = exported("llama")
    down = {k: v for k, v in load_file(files["peft"].path).items() if "down_proj" in k}
    folder = folder_of(tmp_path / "down", down, json.loads((files["peft"].folder / "adapter_config.json").read_text()))
    with pytest.raises(UserError, match=r"2 of 2 adapted modules are not among the allowed targets: .*down_proj"):
        load_adapter(folder, base.skeleton, allowed=("q_proj", "k_proj", "v_proj"))
    assert load_adapter(folder, base.skeleton, allowed=("down_proj",)).sites


def test_eval_and_training_read_any_layout_and_say_which(exported, capsys):
    base, _, _, files, ours = exported("mixtral")
    adapter = Adapter.load(files["vllm"].folder, base.skeleton)
    assert "layout vllm" in capsys.readouterr().err
    assert adapter.layout == "vllm"
    assert all(torch.equal(p, adapter.parameters()[name]) for name, p in ours.parameters().items())
