"""GPFL's head: a conditional valve makes personal features of a device's classes and generic ones of all classes.

Source: Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
Federated Learning", ICCV 2023; baselines.md section 25.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedge.models.layers.policy import Own


class ValveHead(nn.Module):
    """Logits (n, C) = Hd_i(CoV(f, p_i)) of features f (n, D), p_i the mean of class embeddings by the device's shares.

    The device's vector holds its class shares (C,), at first equal ones. In training, p_i is made of embeddings as they
    were when `freeze` was called; they do not learn from the logits.

    Args:
        head: the network's own head, with which the device's head begins.
    """

    embeddings: Tensor

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        n_classes, d = head.weight.shape
        self.gamma, self.beta = (nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.LayerNorm(d)) for _ in range(2))
        self.embeddings = nn.Parameter(torch.randn(n_classes, d))
        self.own = Own(head, torch.full((n_classes,), 1 / n_classes))
        self.frozen: Tensor | None = None

    @torch.no_grad()
    def freeze(self, shares: Tensor) -> Tensor:
        """Note the embeddings (C, D) and the device's class shares (C,) for the coming round; return the embeddings."""
        self.own.vector.copy_(shares)
        self.frozen = self.embeddings.detach().clone()
        return self.frozen

    def open_valve(self, f: Tensor, condition: Tensor) -> Tensor:
        """Compute CoV(f, c) = ReLU((gamma(c) + 1) f + beta(c)), (n, D), of features (n, D) and a condition c (D,)."""
        out: Tensor = torch.relu((self.gamma(condition) + 1) * f + self.beta(condition))
        return out

    def forward(self, f: Tensor) -> Tensor:
        """Compute the logits (n, C) of features (n, D)."""
        embeddings = self.frozen if self.training and self.frozen is not None else self.embeddings.detach()
        out: Tensor = self.own(self.open_valve(f, self.own.vector @ embeddings))
        return out
