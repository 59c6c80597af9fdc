"""Modules that use a large weight in a way of their own (`torch.bmm`, `F.linear` on a slice), neither as a linear layer nor
through the experts interface: Llama 4's, JetMoE's and LongCat's experts.

Their weights lie in the buffer that the next layer reuses, so autograd may keep no view of them. `stand_in_readers` puts a
`Reader` in the place of each: it calls the family's own module and has autograd keep a weight's name instead. Exact for
any code; all of the layer's weights are dequantised, and none of these gets a LoRA pair.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lamella.checkpoint.facts import QUANTISED_CLASSES, classify_in_layer
from lamella.models.fused import Fused
from lamella.models.linear import FrozenLinear
from lamella.models.mixers import Mixer, weights_by_name


class Reader(Fused):
    """Stands in the place of a module that reads its weights itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__["own"]
        with weights_by_name(own):
            return own(*args, **kwargs)


def is_experts(module: nn.Module) -> bool:
    """Whether a module's weights are experts of transformers' interface."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def stand_in_readers(layer: nn.Module, num_experts: int | None) -> None:
    """Put a `Reader` in the place of each module of a layer that owns a weight to be quantised and is not served otherwise."""
    inside = {id(m) for mixer in layer.modules() if isinstance(mixer, Mixer) for m in mixer.modules()}
    for path, module in list(layer.named_modules()):
        if not path or id(module) in inside or isinstance(module, FrozenLinear) or is_experts(module):
            continue
        names = [(f"{path}.{name}", p.shape) for name, p in module.named_parameters(recurse=False)]
        if any(classify_in_layer(name, tuple(shape), num_experts) in QUANTISED_CLASSES for name, shape in names):
            parent, _, last = path.rpartition(".")
            layer.get_submodule(parent)._modules[last] = Reader(module)
