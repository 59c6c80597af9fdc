"""The engine: one model, one device, the layer-major walk."""

from lamella.engine.engine import Engine
from lamella.engine.step import StepOutput

__all__ = ["Engine", "StepOutput"]
