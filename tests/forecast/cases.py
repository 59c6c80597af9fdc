"""Shapes, times and ranks for the tests of the simulator."""

from dataclasses import dataclass, field

from lamella.forecast.items import RankPlan
from lamella.forecast.shape import Core, LayerShape, Matrix, ModelShape, Site

HIDDEN = 64
UP = Matrix("mlp.up_proj", "mlp", 4 * HIDDEN, HIDDEN)
CORE = Core("full", 4, 4, 16, 16, 128)


def shape(layers=6, store_bytes=1000, core=CORE):
    one = LayerShape((UP,), core, 0, 4000, store_bytes, 0)
    return ModelShape(
        "made up", "llama", "config.json", HIDDEN, 1000, None, False, (one,) * layers, 0, 0, 0, 0, {}, {}, 0, 0
    )


def sites(layers=6, first=0):
    return [Site(i, UP, 2) for i in range(first, layers)]


@dataclass(frozen=True)
class Fake:
    """Times per token and layer in plain numbers."""

    forward_s: float = 1.0
    backward_s: float = 2.0
    recompute_s: float = 1.0
    dequantise_s: float = 0.0
    head_s: float = 0.0
    prologue_s: float = 0.0
    update_s: float = 0.0
    hang_s: float = 0.0
    slower: dict = field(default_factory=dict)

    def _shared(self, seconds):
        return {"linear": 0.75 * seconds, "attention": 0.25 * seconds}

    def forward(self, layer, lengths):
        return self._shared(self.forward_s * sum(lengths) * self.slower.get(layer, 1.0))

    def backward(self, layer, lengths, recompute):
        each = self.backward_s + (self.recompute_s if recompute else 0.0)
        return self._shared(each * sum(lengths) * self.slower.get(layer, 1.0))

    def dequantise(self, layer):
        return self.dequantise_s

    def hang(self, layer):
        return self.hang_s

    def prologue(self, tokens):
        return self.prologue_s * tokens

    def head(self, label_tokens):
        return self.head_s * label_tokens

    def update(self, parameters):
        return self.update_s * parameters


def rank_plan(times=None, resident=(), **more):
    return RankPlan(times or Fake(), frozenset(resident), **more)
