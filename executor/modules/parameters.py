"""The parameters of a user's module, and where our Net has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

# Views of a tensor of ours that have the shape of theirs. A view reads and writes, so that one
# table takes weights both ways.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda ours: ours,
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
class Where:
    """Where our Net, or one of its layers, has a tensor of the user's module."""

    name: str
    view: str = "whole"
    after: int = 0  # columns of the user's tensor before it, where several lie side by side

    def under(self, prefix: str) -> Where:
        """The same of a Net that has the layer at `prefix`."""
        return replace(self, name=f"{prefix}.{self.name}")

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensor, in the user's shape, among ours."""
        return VIEWS[self.view](tensors[self.name])


Places = tuple[Where, ...]  # of a tensor of the user's: one, or several side by side


@dataclass(frozen=True)
class Parameters:
    """The state_dict that training starts from, and where our Net has its tensors.

    A tensor without a place takes no part in training."""

    state: Mapping[str, Tensor]
    places: Mapping[str, Places]

    def fill(self, net: nn.Module) -> None:
        """Give our Net these parameters, as far as it holds their tensors.

        A Net that is cut by columns (P3) has smaller ones, and is filled from a whole Net."""
        ours = net.state_dict()
        for name, found in self.places.items():
            for where in found:
                if where.name not in ours:
                    continue
                mine, theirs = where.of(ours), self.state[name]
                if len(found) > 1:
                    theirs = theirs[:, where.after : where.after + mine.shape[1]]
                if mine.shape == theirs.shape:
                    mine.copy_(theirs)

    def trained(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our Net's weights as the state_dict of the user's module."""
        return {
            name: _beside([where.of(ours) for where in self.places[name]])
            .to(value.dtype)
            .contiguous()
            if name in self.places
            else value.contiguous()
            for name, value in self.state.items()
        }


def _beside(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The state_dict with its floating numbers in another type."""
    return {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else None)
        for name, value in state.items()
    }
