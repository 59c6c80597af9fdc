"""Whether a checkpoint makes a model that Lamella can run, found out before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from lamella.models.binding import plan_binding
from lamella.models.skeleton import Skeleton, load_config
from lamella.models.trial import check_readers, try_layers


def check_checkpoint(folder: Path, tied: bool, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Build the weightless model, run it on `meta`, and find every parameter's source among the tensors to be stored.

    Args:
        folder: holds config.json.
        tied: whether the head is the embeddings (what the files say).
        shapes: tensor name -> shape.

    Raises:
        UserError: an architecture or a config that transformers cannot build, a family that is not supported, tensors
            that the model does not know, parameters without a source, shapes that disagree.
    """
    skeleton = Skeleton(load_config(folder, tied), torch.bfloat16)
    plans = plan_binding(skeleton, shapes, str(folder))
    check_readers(skeleton, plans)
    try_layers(skeleton)
