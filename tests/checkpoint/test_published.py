"""Parameters and bytes of public models, from their configs by hand, against what is published of them."""

from dataclasses import dataclass

import pytest

from lamella.checkpoint.architecture import tensor_shapes
from lamella.forecast.describe import shape_of
from tests.checkpoint.published import CONFIGS
from tests.forecast.models import config_file

KERAS = "keras-hub's presets (keras_hub/src/models/*/*_presets.py), `params`"
CARD = "model card on the Hugging Face hub"
DEEPSEEK = "deepseek-ai/DeepSeek-V3, README_WEIGHTS.md"
GPT_OSS = "gpt-oss model card, arXiv:2508.10925, table 1"
INDEX = "model.safetensors.index.json, total_size"


@dataclass(frozen=True)
class Point:
    """`what` of a model, as published; `tolerance`: half of the last digit given, where it is a round figure."""

    model: str
    what: str
    value: float
    tolerance: float
    source: str


POINTS = [
    Point("Qwen3-0.6B", "total", 596_049_920, 0, KERAS),
    Point("Qwen3-8B", "total", 8_190_735_360, 0, KERAS),
    Point("Qwen3-32B", "total", 32_762_123_264, 0, KERAS),
    Point("Qwen3-30B-A3B", "total", 30_532_122_624, 0, KERAS),
    Point("Qwen3-30B-A3B", "active with embedding", 3.3e9, 0.02, CARD),
    Point("Qwen3-235B-A22B", "total", 235_093_634_560, 0, KERAS),
    Point("Qwen3-235B-A22B", "active with embedding", 22e9, 0.01, CARD),
    Point("Qwen3-235B-A22B", "without tables", 234e9, 0.005, CARD),
    Point("Qwen3-Next-80B-A3B", "total", 80e9, 0.01, CARD),
    Point("Mixtral-8x7B", "total", 46_702_792_704, 0, KERAS),
    Point("Mixtral-8x7B", "active with embedding", 12.9e9, 0.005, "mistral.ai/news/mixtral-of-experts"),
    Point("Mixtral-8x22B", "total", 140_620_634_112, 0, "hub, mistral-community/Mixtral-8x22B-v0.1, discussion 6"),
    Point("Mixtral-8x22B", "active with embedding", 39_152_031_744, 1e-9, "the same"),
    Point("GPT-OSS-20B", "total", 20.91e9, 0.0005, GPT_OSS),
    Point("GPT-OSS-20B", "active", 3.61e9, 0.0015, GPT_OSS),
    Point("GPT-OSS-20B", "checkpoint", 12.8 * 2**30, 0.004, GPT_OSS),
    Point("GPT-OSS-120B", "total", 116.83e9, 0.0005, GPT_OSS),
    Point("GPT-OSS-120B", "active", 5.13e9, 0.001, GPT_OSS),
    Point("GPT-OSS-120B", "checkpoint", 60.8 * 2**30, 0.001, GPT_OSS),
    Point("DeepSeek-V3", "total", 671e9, 0.001, DEEPSEEK),
    Point("DeepSeek-V3", "active", 36.6e9, 0.0015, DEEPSEEK + ": with 0.9B of the head, without the embedding"),
    Point("DeepSeek-V3", "beyond", 11.5e9 + 2 * 0.927e9, 0.01, DEEPSEEK + ": 11.5B, and copies of embedding and head"),
    Point("DeepSeek-V3", "checkpoint", 688_586_727_753, 0.0005, "its repository's weight files, which have headers too"),
    Point("Kimi-K2", "total", 1e12, 0.03, "github.com/MoonshotAI/Kimi-K2, README: 1T"),
    Point("Kimi-K2", "active", 32e9, 0.015, "the same: 32B"),
    Point("GLM-4.5", "total", 355e9, 0.01, "transformers' documentation of Glm4Moe; arXiv:2508.06471"),
    Point("GLM-4.5", "active in layers", 32e9, 0.01, "the same"),
    Point("GLM-4.5-Air", "total", 106e9, 0.01, "the same"),
    Point("GLM-4.5-Air", "active in layers", 12e9, 0.02, "the same"),
    Point("Llama-3.1-8B", "total", 8_030_261_248, 0, KERAS),
    Point("Llama-3.1-8B", "checkpoint", 16_060_522_496, 0, INDEX),
    Point("Llama-3.1-70B", "total", 70e9, 0.01, "The Llama 3 herd of models, arXiv:2407.21783"),
    Point("Llama-3.1-405B", "total", 405e9, 0.005, "The Llama 3 herd of models, arXiv:2407.21783"),
    Point("Llama-4-Scout", "total", 109e9, 0.015, "transformers' documentation of Llama4: 109B, 0.9B of them vision"),
    Point("Llama-4-Maverick", "total", 402e9, 0.005, "the same: 402B"),
    Point("Gemma-3-27B", "total", 27_009_002_240, 2e-5, KERAS + " (64 rows fewer of the vocabulary)"),
]  # fmt: skip


def measure(shape, what):
    tables = shape.embedding_parameters + shape.head_parameters
    return {
        "total": shape.total_parameters, "active": shape.active_parameters, "beyond": shape.beyond_parameters,
        "active with embedding": shape.active_parameters + (0 if shape.tied else shape.embedding_parameters),
        "active in layers": shape.active_parameters - shape.head_parameters, "without tables": shape.total_parameters - tables,
        "checkpoint": shape.checkpoint_bytes,
    }[what]  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return {name: shape_of(config_file(folder, config)) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p.model}: {p.what}")
def test_published_figures(point, shapes):
    assert measure(shapes[point.model], point.what) == pytest.approx(point.value, rel=point.tolerance, abs=0), (
        point.source
    )


def test_every_model_has_a_point():
    assert {point.model for point in POINTS} == set(CONFIGS)
    assert len(CONFIGS) >= 15


@pytest.mark.parametrize("name", CONFIGS)
def test_classes_add_up_to_the_tensors(name, shapes):
    shape, tensors = shapes[name], tensor_shapes(CONFIGS[name])
    numel = 0
    for dims in tensors.values():
        count = 1
        for n in dims:
            count *= n
        numel += count
    assert shape.total_parameters + shape.beyond_parameters == numel
    layers = sum(sum(m.parameters for m in layer.matrices) + layer.other_parameters for layer in shape.layers)
    outer = shape.embedding_parameters + shape.head_parameters + shape.outer_parameters
    assert layers + outer == shape.total_parameters


def test_kinds_of_attention(shapes):
    def kinds(name):
        return [layer.core.kind for layer in shapes[name].layers]

    assert kinds("Qwen3-Next-80B-A3B") == ["linear", "linear", "linear", "full"] * 12
    assert kinds("GPT-OSS-20B") == ["sliding", "full"] * 12
    assert kinds("Gemma-3-27B") == (["sliding"] * 5 + ["full"]) * 10 + ["sliding"] * 2
    assert kinds("Llama-4-Scout") == ["sliding", "sliding", "sliding", "full"] * 12
    assert {layer.core.window for layer in shapes["Gemma-3-27B"].layers} == {1024, None}
    latent = shapes["DeepSeek-V3"].layers[0].core
    assert (latent.heads, latent.head_dim, latent.value_dim, latent.kv_elements) == (128, 192, 128, 576)
    assert shapes["Qwen3-235B-A22B"].layers[0].core.kv_elements == 2 * 4 * 128
    assert [any(m.fused_experts for m in layer.matrices) for layer in shapes["Llama-4-Maverick"].layers] == [
        False,
        True,
    ] * 24
