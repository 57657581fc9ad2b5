"""FedCP's head: a policy divides each sample's features between a shared head and one of the device's own.

Source: Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional
Policy", KDD 2023; baselines.md section 24.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional


class Own(nn.Module):
    """What stays on a device: a head (D inputs, C outputs), and a vector that tells the device from others."""

    vector: Tensor

    def __init__(self, head: nn.Linear, vector: Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("vector", vector)

    def forward(self, f: Tensor) -> Tensor:
        """Compute the logits (n, C) of features (n, D)."""
        out: Tensor = self.head(f)
        return out


class PolicyHead(nn.Module):
    """Logits (n, C) = Hd_i(r f) + Hd(s f) of features f (n, D), where r and s = 1 - r are what the policy says of f.

    In training the policy is drawn (Gumbel-softmax with temperature 1), and the shared head does not learn.

    Args:
        head: the network's own head, with which both heads begin.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        d = head.in_features
        self.shared = head
        self.policy = nn.Sequential(nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.ReLU())
        self.own = Own(copy.deepcopy(head), head.weight.detach().sum(dim=0))
        self.generator: torch.Generator | None = None  # of the drawn policies; torch's own if None

    def compute_policy(self, f: Tensor) -> Tensor:
        """Compute r (n, D), the share of each feature that is the device's own, in [0, 1]."""
        scores = self.policy(f * functional.normalize(self.own.vector, dim=0))
        own, shared = scores.tensor_split(2, dim=1)
        apart: Tensor = own - shared
        if self.training:  # the difference of two Gumbel numbers
            drawn = torch.rand(apart.shape, generator=self.generator, device=apart.device)
            apart = apart + drawn.logit(eps=1e-6)
        return apart.sigmoid()

    def forward(self, f: Tensor) -> Tensor:
        """Compute the logits (n, C) of features (n, D)."""
        r = self.compute_policy(f)
        out: Tensor = self.own(r * f)
        shared = (1 - r) * f
        if self.training:
            return out + functional.linear(shared, self.shared.weight.detach(), self.shared.bias.detach())
        return out + functional.linear(shared, self.shared.weight, self.shared.bias)

    @torch.no_grad()
    def end_round(self, weight: Tensor, bias: Tensor) -> None:
        """Move the shared head to the mean of what it was, `weight` (C, D) and `bias` (C,), and the device's own head.

        The device's vector becomes the sum of its head's rows.
        """
        self.shared.weight.copy_((weight + self.own.head.weight) / 2)
        self.shared.bias.copy_((bias + self.own.head.bias) / 2)
        self.own.vector.copy_(self.own.head.weight.sum(dim=0))
