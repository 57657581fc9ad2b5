"""A small U-Net: two steps down, two steps up, with the features of each height beside those that come up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

GROUPS = 4
"""Groups of channels that are normalised together; running statistics would be averaged over devices."""


class UNet(nn.Module):
    """Images (n, channels, H, W) to outputs (n, n_outputs, H, W), H and W at least 8."""

    def __init__(self, input_shape: tuple[int, ...], n_outputs: int, channels: int) -> None:
        super().__init__()
        self.sides = input_shape[1:]
        self.first = _make_block(input_shape[0], channels)
        self.second = _make_block(channels, 2 * channels)
        self.middle = _make_block(2 * channels, 4 * channels)
        self.fourth = _make_block(6 * channels, 2 * channels)
        self.fifth = _make_block(3 * channels, channels)
        self.last = nn.Conv2d(channels, n_outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs of a batch."""
        height, width = self.sides
        high = self.first(x)
        low = self.second(functional.max_pool2d(high, 2))
        middle = self.middle(functional.max_pool2d(low, 2))
        low = self.fourth(torch.cat([low, _enlarge(middle, height // 2, width // 2)], dim=1))
        high = self.fifth(torch.cat([high, _enlarge(low, height, width)], dim=1))
        out: Tensor = self.last(high)
        return out


def _make_block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(min(GROUPS, after), after), nn.ReLU())


def _enlarge(x: Tensor, height: int, width: int) -> Tensor:
    """Repeat rows and columns twice, and the last ones until the size is right."""
    return functional.interpolate(x, size=(height, width), mode="nearest")
