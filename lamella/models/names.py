"""The names and shapes that a model's checkpoint would have, without its weights."""

from __future__ import annotations

from transformers.core_model_loading import revert_weight_conversion

from lamella.models.binding import model_parameters, plan_binding
from lamella.models.skeleton import Skeleton


def checkpoint_shapes(skeleton: Skeleton) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape as `save_pretrained` would write them: fused experts one by one where the family stores
    them so, a tied head not at all.

    Raises:
        UserError: a family whose names cannot be followed back to its parameters (see `plan_binding`).
    """
    parameters = {name: tensor for name, (_, tensor) in model_parameters(skeleton).items()}
    stored = revert_weight_conversion(skeleton.model, parameters)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    plan_binding(skeleton, shapes)
    return shapes
