"""ResNet-MoE small: a residual network whose blocks route each sample to expert branches.

Source: FedCoE, arXiv 2605.21264, in the edge size of docs/methods/fedcoe.md, section 8. It uses GroupNorm instead of
BatchNorm, since averaging running statistics over devices with different data is wrong. Routers are ordinary
parameters.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS: Final = (8, 8, 16, 32)  # channels of the stem and the three blocks
GROUPS: Final = 4  # groups of every GroupNorm
SMALL: Final = 8  # pixels; smaller images keep their size in the second block


class ResNetMoE(nn.Module):
    """The network: a stem, three blocks, global average pooling, and a linear head.

    Args:
        input_shape: (channels, height, width).
        n_classes: C, the number of classes.
        experts: m, the number of branches of each block.
        top: k <= m, the number of branches for a sample.

    Parameters with one input channel and ten classes: 38,536 with m = 2; 19,845 with m = 1.
    """

    def __init__(self, input_shape: tuple[int, ...], n_classes: int, *, experts: int, top: int) -> None:
        super().__init__()
        strides = (1, 1 if min(input_shape[1:]) < SMALL else 2, 2)
        self.stem = nn.Sequential(*_make_convolution(input_shape[0], CHANNELS[0], 1), nn.ReLU())
        self.blocks = nn.Sequential(
            *(
                Block(n_in, n_out, stride, experts, top)
                for n_in, n_out, stride in zip(CHANNELS[:-1], CHANNELS[1:], strides, strict=True)
            )
        )
        self.head = nn.Linear(CHANNELS[-1], n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (n, C) of inputs (n, channels, height, width)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits


class Block(nn.Module):
    """A block: ReLU(sum over the k largest r_e of u_e branch_e(x) + shortcut(x)), r = softmax(W_r avgpool(x) + b)."""

    def __init__(self, n_in: int, n_out: int, stride: int, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(n_in, experts)
        self.branches = nn.ModuleList(
            nn.Sequential(*_make_convolution(n_in, n_out, stride), nn.ReLU(), *_make_convolution(n_out, n_out, 1))
            for _ in range(experts)
        )
        same = n_in == n_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_make_convolution(n_in, n_out, stride, kernel=1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, n_in, h, w) to (n, n_out, h', w'); all branches are computed, as a batch needs most of them."""
        u = self.compute_shares(x)
        outputs = torch.stack([branch(x) for branch in self.branches], dim=1)
        return functional.relu((u[:, :, None, None, None] * outputs).sum(dim=1) + self.shortcut(x))

    def compute_shares(self, x: Tensor) -> Tensor:
        """Return weights u (n, m): r of the best branch for k = 1, else the k largest r divided by their sum; others 0.

        On a tie the lowest index wins. With k = 1 normalising would make the weight a constant 1, without a gradient
        for the router.
        """
        r = functional.softmax(self.router(x.mean(dim=(2, 3))), dim=1)
        rivals, own = r[:, None, :], r[:, :, None]
        # Count instead of sorting: torch and ONNX Runtime break ties in `topk` differently, and stable sorts cannot be
        # exported.
        earlier = torch.ones(r.shape[1], r.shape[1], dtype=torch.bool, device=r.device).tril(-1)
        better = (rivals > own) | ((rivals == own) & earlier)
        u = r * (better.sum(dim=2) < self.top)
        return u if self.top == 1 else u / u.sum(dim=1, keepdim=True)


def _make_convolution(n_in: int, n_out: int, stride: int, kernel: int = 3) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(n_in, n_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.GroupNorm(GROUPS, n_out)
