"""Where a model's parameters come from: stored tensors and the places they fill; parts of them that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the contiguous run of a parameter that it fills.

    `at` indexes the parameter: () whole; (first, last) its rows first..last-1; (e,) one expert; (e, first, last) rows
    first..last-1 of expert e.
    """

    source: str
    at: tuple[int, ...] = ()

    def view(self, parameter: Tensor) -> Tensor:
        if len(self.at) == 3:
            return parameter[self.at[0], self.at[1] : self.at[2]]
        if len(self.at) == 2:
            return parameter[self.at[0] : self.at[1]]
        return parameter[self.at[0]] if self.at else parameter

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of `view` on a parameter of this shape."""
        if len(self.at) == 3:
            return (len(range(whole[1])[self.at[1] : self.at[2]]), *whole[2:])
        if len(self.at) == 2:
            return (len(range(whole[0])[self.at[0] : self.at[1]]), *whole[1:])
        return whole[1:] if self.at else whole


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that a rank holds: indices `first` .. `last` - 1 of dimension `dim`."""

    dim: int
    first: int
    last: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view."""
        return tensor.narrow(self.dim, self.first, self.last - self.first)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.last - self.first, *whole[self.dim + 1 :])


@dataclass
class ParamPlan:
    """Where one parameter (or persistent buffer) of the model comes from.

    Attributes:
        name: full dotted name in the model.
        layer: decoder layer index, or None outside the layers.
        shape: shape in the model.
        pieces: stored tensors that fill it.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)
