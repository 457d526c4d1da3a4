"""The parameters of a user's module, and where our Net has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, dtype, nn

# Views of a tensor of ours that have the shape of theirs. A view reads and writes, so that one
# table takes weights both ways.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda ours: ours,
    "transposed": Tensor.t,
    "heads": lambda ours: ours[None],  # [heads, width] as [1, heads, width]
    # [a_l | a_r] of each head [heads, 2 width] as one of the two [1, heads, width]
    "left": lambda ours: ours.chunk(2, 1)[0][None],
    "right": lambda ours: ours.chunk(2, 1)[1][None],
    # of sources and of readers, which stand one above the other
    "upper": lambda ours: ours.chunk(2)[0],
    "lower": lambda ours: ours.chunk(2)[1],
}


@dataclass(frozen=True)
class Parameters:
    """The state_dict that training starts from, and where our Net has its tensors.

    places: by the name of the user's tensor that of ours, as "name" or "name:view". A tensor
    without a place takes no part in training."""

    state: Mapping[str, Tensor]
    places: Mapping[str, str]

    def fill(self, net: nn.Module) -> None:
        """Give our Net these parameters, as far as it holds their tensors.

        A Net that is cut by columns (P3) has smaller ones, and is filled from a whole Net."""
        ours = net.state_dict()
        for name, place in self.places.items():
            if place.partition(":")[0] in ours:
                mine = _at(place, ours)
                if mine.shape == self.state[name].shape:
                    mine.copy_(self.state[name])

    def trained(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our Net's weights as the state_dict of the user's module."""
        return {
            name: (
                _at(self.places[name], ours).to(value.dtype) if name in self.places else value
            ).contiguous()
            for name, value in self.state.items()
        }


def _at(place: str, ours: Mapping[str, Tensor]) -> Tensor:
    """The tensor in a place, in the user's shape."""
    name, _, view = place.partition(":")
    return VIEWS[view](ours[name])


def cast(state: Mapping[str, Tensor], to: dtype) -> dict[str, Tensor]:
    """The state_dict with its floating numbers in another type."""
    return {
        name: value.detach().to("cpu", to if value.is_floating_point() else None)
        for name, value in state.items()
    }
