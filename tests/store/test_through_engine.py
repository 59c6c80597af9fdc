"""A store's model as the engine runs it, in fp32, against transformers on the same weights under the true config."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from lamella.engine import Engine
from lamella.models.layout import pack_rows
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests.checkpoint.helpers import write_fused, write_tensors
from tests.conftest import random_rows
from tests.fixtures import dense_config, moe_config, write_checkpoint
from tests.oracle import load_reference, relative_error, write_dequantised
from tests.store.test_quantize import tied_variant

ROWS = random_rows((5, 23, 40))


def logits_of(model, rows=ROWS):
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids, _ in rows])


@pytest.mark.parametrize(
    ("head", "key", "value"),
    [(True, "none", False), (False, "none", False), (True, "nested", True), (False, "nested", False),
     (True, "nested", False), (False, "nested", True)],
)  # fmt: skip
def test_b26_logits_follow_the_files(tmp_path, head, key, value):
    """The three builds of the case: no key with and without a head, and the key only in `text_config`, right or wrong."""
    source = tied_variant(tmp_path, head=head, key=key, value=value)
    quantize_checkpoint(source, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    base = write_dequantised(store, tmp_path / "base")
    dense_config(tie_word_embeddings=not head).save_pretrained(base)  # the truth, not what the checkpoint says
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": not head}
    (base / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    wanted = logits_of(load_reference(base))
    assert relative_error(Engine.open(store, dtype="fp32").logits(pack_rows(ROWS)), wanted) < 1e-5


def router_logits(engine, batch):
    """Router logits [tokens, experts] of each layer, as the engine computes them."""
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        router.register_forward_hook(lambda _, __, out, i=i, which=which: seen.update(
            {i: (out[which] if isinstance(out, tuple) else out).detach().float().view(-1, out[which].shape[-1])}))
        for i, (router, which) in engine.skeleton.routers().items()
    ]  # fmt: skip
    engine.logits(batch)
    for hook in hooks:
        hook.remove()
    return [seen[i] for i in sorted(seen)]


def test_b41_experts_chosen_by_the_loaded_model(tmp_path):
    """500 tokens through nearly equal router rows: wherever the margin exceeds the activations' error, one choice."""
    config = moe_config(experts=32, top_k=4)
    source = write_checkpoint(tmp_path / "moe", config, shards=1)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for i in range(2):
        base = torch.randn(1, 64, generator=generator)
        rows = base + 0.01 * torch.randn(32, 64, generator=generator)
        tensors[f"model.layers.{i}.mlp.gate.weight"] = rows
    write_tensors(source, json.loads((source / "config.json").read_text()), tensors)
    quantize_checkpoint(source, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    batch_rows = random_rows([50] * 10, seed=3)
    ours = router_logits(Engine.open(store, dtype="fp32"), pack_rows(batch_rows))
    reference = load_reference(write_dequantised(store, tmp_path / "base"))
    theirs: list[list[torch.Tensor]] = [[], []]
    for ids, _ in batch_rows:
        with torch.no_grad():
            out = reference(input_ids=torch.tensor([ids]), output_router_logits=True)
        for layer, logits in zip(theirs, out.router_logits, strict=True):
            layer.append(logits)
    for mine, pieces, name in zip(ours, theirs, ("0", "1"), strict=True):
        wanted = torch.cat(pieces).float()
        assert mine.shape == wanted.shape == (500, 32)
        error = (mine - wanted).abs().amax(1)
        ranked = wanted.sort(dim=1, descending=True).values
        clear = ranked[:, 3] - ranked[:, 4] > 2 * error
        assert clear.sum() > 490, name  # the margins are small, the error far smaller: the test says something
        chosen = [x.topk(4).indices.sort().values[clear] for x in (mine, wanted)]
        assert torch.equal(*chosen), name
        assert float(error.max()) < 1e-4, name


def test_fused_expert_checkpoint_runs_and_equals_the_reference(tmp_path):
    """Experts as 3-D parameters, the way the model itself holds them."""
    config = moe_config(experts=8, top_k=2)
    source = write_fused(tmp_path / "fused", config, dtype=torch.float32)
    quantize_checkpoint(source, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    names = {record.name for record in store.records(0)}
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in name for name in names)
    wanted = logits_of(load_reference(write_dequantised(store, tmp_path / "base")))
    assert relative_error(Engine.open(store, dtype="fp32").logits(pack_rows(ROWS)), wanted) < 1e-5
