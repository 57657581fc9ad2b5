"""Optimisers, which move weights by a gradient in each training step.

Weights and gradients are vectors (d,), or matrices (n, d) of n models side by side, each with a row of its own.
`fedge.models.training.Trainer` calls an optimiser around each backward pass; a user's own step can give the trainer
another optimiser. The numbers are those of `torch.optim`, whose optimisers know no models side by side.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import torch
from torch import Tensor

from fedge.steps.sgd import Sgd

BETA2: Final = 0.999
"""Decay of Adam's mean squared gradient; that of its mean gradient, beta1, is the recipe's momentum."""
EPSILON: Final = 1e-8
"""Added to the root of Adam's mean squared gradient."""
CLIP_EPSILON: Final = 1e-6
"""Added to the norm of a gradient that is clipped, as by `torch.nn.utils.clip_grad_norm_`."""


class Optimizer(Protocol):
    """The interface of an optimiser: `begin` is called before the backward pass of a batch, `step` after it."""

    def begin(self, gradient: Tensor) -> None:
        """Prepare the numbers to which the backward pass adds; they are those that `step` left, at first 0."""

    def step(self, weights: Tensor, gradient: Tensor) -> None:
        """Move the weights by the gradient."""


def make_optimizer(sgd: Sgd, anchor: Tensor | None = None) -> Optimizer:
    """Make the optimiser of a recipe, in its first state. `anchor`: the weights towards which the proximal term pulls.

    Example:
        >>> type(make_optimizer(Sgd(optimizer="adam", learning_rate=0.001))).__name__
        'Adam'
    """
    if sgd.optimizer in {"adam", "adamw"}:
        return Adam(sgd, anchor)
    return ClippedMomentum(sgd, anchor) if sgd.nesterov or sgd.clip_norm else Momentum(sgd, anchor)


class Momentum:
    """SGD: v <- momentum * v + gradient + mu * (w - anchor) + weight_decay * w; w <- w - learning_rate * v.

    v is kept in the network's `gradient`, so the backward pass adds to momentum * v instead of to zeros. The numbers
    are the same; a step of `cnn_fedavg`, batch 10, takes 9.0 instead of 9.6 ms of one processor.

    `anchor` holds the weights towards which the proximal term pulls, if `sgd` has such a term.
    """

    def __init__(self, sgd: Sgd, anchor: Tensor | None = None) -> None:
        self._sgd = sgd
        self._anchor = anchor if sgd.proximal_mu else None

    def begin(self, gradient: Tensor) -> None:
        """Multiply v, which is in `gradient`, by the momentum."""
        gradient.mul_(self._sgd.momentum)

    def step(self, weights: Tensor, gradient: Tensor) -> None:
        """Move the weights; afterwards `gradient` holds v."""
        if self._anchor is not None:
            gradient.add_(weights - self._anchor, alpha=self._sgd.proximal_mu)
        if self._sgd.weight_decay:
            gradient.add_(weights, alpha=self._sgd.weight_decay)
        weights.add_(gradient, alpha=-self._sgd.learning_rate)


class _Prepared:
    """An optimiser with a state of its own, so that the gradient is that of the batch alone and can be clipped."""

    def __init__(self, sgd: Sgd, anchor: Tensor | None = None) -> None:
        self._sgd = sgd
        self._anchor = anchor if sgd.proximal_mu else None

    def begin(self, gradient: Tensor) -> None:
        """Set the gradient to zero."""
        gradient.zero_()

    def _prepare_gradient(self, weights: Tensor, gradient: Tensor) -> None:
        """Add the proximal term's gradient, and shorten each row that is longer than `clip_norm`."""
        if self._anchor is not None:
            gradient.add_(weights - self._anchor, alpha=self._sgd.proximal_mu)
        if self._sgd.clip_norm:
            norms = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((self._sgd.clip_norm / (norms + CLIP_EPSILON)).clamp_(max=1))


class Shifted:
    """Another optimiser whose gradients all get the same vector added: the gradient of a linear term of the loss.

    SCAFFOLD adds c - c_i, FedDyn minus its last local gradient. `shift`: as long as the weights, (d,).
    """

    def __init__(self, inner: Optimizer, shift: Tensor) -> None:
        self._inner = inner
        self._shift = shift

    def begin(self, gradient: Tensor) -> None:
        """Prepare the gradient as the other optimiser does."""
        self._inner.begin(gradient)

    def step(self, weights: Tensor, gradient: Tensor) -> None:
        """Move the weights by the gradient plus the vector."""
        self._inner.step(weights, gradient.add_(self._shift))


class ClippedMomentum(_Prepared):
    """SGD with clipped gradients: g <- clip(gradient + mu * (w - anchor)) + weight_decay * w; v <- momentum * v + g.

    Then w <- w - learning_rate * v or, with Nesterov's momentum, w - learning_rate * (g + momentum * v).
    """

    _velocity: Tensor | None = None

    def step(self, weights: Tensor, gradient: Tensor) -> None:
        """Move the weights, and v."""
        sgd = self._sgd
        self._prepare_gradient(weights, gradient)
        if sgd.weight_decay:
            gradient.add_(weights, alpha=sgd.weight_decay)
        if self._velocity is None:
            self._velocity = torch.zeros_like(gradient)
        self._velocity.mul_(sgd.momentum).add_(gradient)
        towards = gradient.add_(self._velocity, alpha=sgd.momentum) if sgd.nesterov else self._velocity
        weights.add_(towards, alpha=-sgd.learning_rate)


class Adam(_Prepared):
    """Adam (Kingma and Ba, ICLR 2015, Algorithm 1), and AdamW (Loshchilov and Hutter, ICLR 2019, Algorithm 2).

    g <- clip(gradient + mu * (w - anchor)), and Adam adds weight_decay * w, while AdamW first takes learning_rate *
    weight_decay * w from w; m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; in step t

        w <- w - learning_rate * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)
    """

    def __init__(self, sgd: Sgd, anchor: Tensor | None = None) -> None:
        super().__init__(sgd, anchor)
        self._count = 0
        self._state: tuple[Tensor, Tensor, Tensor] | None = None  # m, v, and room for sqrt(v)

    def step(self, weights: Tensor, gradient: Tensor) -> None:
        """Move the weights, m and v."""
        sgd = self._sgd
        self._prepare_gradient(weights, gradient)
        if sgd.weight_decay and sgd.optimizer == "adamw":
            weights.mul_(1 - sgd.learning_rate * sgd.weight_decay)
        elif sgd.weight_decay:
            gradient.add_(weights, alpha=sgd.weight_decay)
        if self._state is None:
            self._state = torch.zeros_like(gradient), torch.zeros_like(gradient), torch.empty_like(gradient)
        m, v, root = self._state
        self._count += 1
        m.lerp_(gradient, 1 - sgd.momentum)
        v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        left1, left2 = 1 - sgd.momentum**self._count, math.sqrt(1 - BETA2**self._count)
        torch.sqrt(v, out=root).add_(EPSILON * left2)  # both sides of the fraction times sqrt(1 - beta2^t)
        weights.addcdiv_(m, root, value=-sgd.learning_rate * left2 / left1)
