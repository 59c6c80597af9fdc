"""Stores whose tensors have other formats than NF4: loss and every LoRA gradient against transformers + PEFT in fp32 on the
dequantised base; residency changes nothing."""

import pytest
import torch

from lamella.engine import Engine
from lamella.engine.device import HostCopier
from lamella.engine.weights import LayerWeights
from lamella.models.layout import pack_rows
from lamella.models.pieces import Cut
from lamella.models.skeleton import Skeleton, load_config
from lamella.store.formats import ClassFormats, Formats, NameRule
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.engine.test_families import (
    FAMILIES,
    LABELS,
    ROWS,
    as_file,
    reference_gradients,
    step_gradients,
    trained_adapter,
)
from tests.fixtures import moe_config, write_checkpoint
from tests.oracle import load_reference, relative_error, write_dequantised
from tests.store.packed_sources import write_mxfp4


def gpt_oss(folder):
    quantize_checkpoint(write_mxfp4(folder / "hf", FAMILIES["gpt_oss"]()), folder / "store")


def mixed(folder):
    """Every format in one layer, experts that differ among themselves, and a layer left as it is."""
    write_checkpoint(folder / "hf", moe_config(layers=3, inner=32), dtype=torch.bfloat16)
    rules = (
        NameRule(match="model.layers.0.*", format="source"),
        NameRule(match="model.layers.1.mlp.experts.2.*", format="int8"),
        NameRule(match="model.layers.1.mlp.experts.3.up_proj.weight", format="source"),
        NameRule(match="*.o_proj.weight", format="nf4"),
    )
    formats = Formats(classes=ClassFormats(experts="mxfp4", attention="int8"), names=rules)
    quantize_checkpoint(folder / "hf", folder / "store", QuantizeSettings(formats=formats))


@pytest.fixture(scope="module", params=[gpt_oss, mixed])
def stored(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    request.param(folder)
    store = Store.open(folder / "store")
    return store, write_dequantised(store, folder / "base"), request.param.__name__


def test_loss_and_every_gradient(stored, tmp_path):
    store, base, name = stored
    formats = {(r.tensor_class, r.format) for i in range(store.manifest.num_layers) for r in store.records(i)}
    assert ("experts", "mxfp4") in formats
    assert name == "gpt_oss" or {("experts", "raw"), ("experts", "int8"), ("attention", "nf4")} <= formats
    engine = Engine.open(store, dtype="fp32")
    reference = load_reference(base)
    wanted = torch.cat([reference(input_ids=torch.tensor([ids])).logits[0] for ids, _ in ROWS])
    assert relative_error(engine.logits(pack_rows(ROWS)), wanted) < 1e-5
    adapter = trained_adapter(engine)
    loss, truth = reference_gradients(adapter, base, tmp_path / "adapter")
    for cuts in ([ROWS], [ROWS[:2], ROWS[2:]]):
        out, gradients = step_gradients(engine, cuts)
        assert out.loss_sum / LABELS == pytest.approx(loss, rel=1e-5)
        worst = {n: relative_error(g, truth[n]) for n, g in as_file(adapter, gradients).items()}
        assert max(worst.values()) < 1e-5, max(worst, key=worst.get)


def test_streaming_and_recompute_do_not_change_a_bit(stored):
    store, _, _ = stored
    whole = Engine.open(store, dtype="fp32", recompute="never")
    trained_adapter(whole)
    _, kept = step_gradients(whole, [ROWS])
    fixed = whole.walk.weights.residency.fixed_bytes
    budget = fixed + 2 * max(store.group_bytes(i) for i in range(store.manifest.num_layers)) + 1
    engine = Engine.open(store, dtype="fp32", recompute="always", budget_bytes=budget)
    trained_adapter(engine)
    _, again = step_gradients(engine, [ROWS])
    assert all(torch.equal(kept[n], again[n]) for n in kept)


def test_bf16_is_close_to_fp32(stored):
    store, _, _ = stored
    found = {}
    for dtype in ("fp32", "bf16"):
        engine = Engine.open(store, dtype=dtype)
        trained_adapter(engine)
        _, gradients = step_gradients(engine, [ROWS])
        found[dtype] = torch.cat([g.flatten() for g in gradients.values()])
    assert relative_error(found["bf16"], found["fp32"]) < 0.1


def whole_parameters(store, layer):
    """Parameter -> its values in fp32, as the oracle's model has them."""
    skeleton = Skeleton(load_config(store.path), torch.float32)
    weights = LayerWeights(store, skeleton, torch.device("cpu"))
    packed, found = store.load(layer), {}
    for name, plan in weights.plans.items():
        if plan.layer == layer:
            found[name] = torch.empty(plan.shape)
            for piece in plan.pieces:
                piece.view(found[name]).copy_(packed.dequantize(piece.source, piece.view(found[name]).clone()))
    return found


CUTS = {"q_proj.weight": Cut(0, 16, 48), "k_proj.weight": Cut(0, 5, 23), "o_proj.weight": Cut(1, 0, 32)}


@pytest.mark.parametrize("slots", [False, True], ids=["experts stay packed", "through slots"])
def test_parts_of_every_format(stored, slots):
    """What a rank holds of a layer, read by ranges, and layers that are copied to slots and dequantised whole."""
    store, _, _ = stored
    for parts in (False, True):
        skeleton = Skeleton(load_config(store.path), torch.float32)
        weights = LayerWeights(store, skeleton, torch.device("cpu"), copier=HostCopier() if slots else None)
        cuts = {}
        if parts:
            for name, plan in weights.plans.items():
                cut = next((c for end, c in CUTS.items() if name.endswith(end)), None)
                cuts |= {} if cut is None else {name: cut}
                if plan.layer is not None and len(plan.shape) == 3:
                    cuts[name] = Cut(0, 1, 3)
            weights.divide(cuts)
        for i in range(store.manifest.num_layers):
            weights.bind(i)
            for name, whole in whole_parameters(store, i).items():
                module, key = weights._owner(weights.plans[name])
                wanted = cuts[name].of(whole) if name in cuts else whole
                held = module.__dict__.get("lamella_packed")
                if held is not None and key in held.plans:
                    assert not slots
                    experts = held.parameter(key, torch.float32)
                    found = torch.stack([experts[e].clone() for e in range(experts.shape[0])])
                else:
                    found = getattr(module, key)
                assert torch.equal(found, wanted), name
        weights.close()
