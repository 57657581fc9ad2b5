from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedge.models.layers.policy import PolicyHead


def head() -> PolicyHead:
    torch.manual_seed(1)
    return PolicyHead(nn.Linear(4, 3)).eval()


def test_it_answers_by_both_heads_as_the_authors_code_does() -> None:
    """By the softmax over the pair of numbers that the policy network has for each feature."""
    own, f = head(), torch.randn(5, 4)
    nn.init.normal_(own.own.head.weight)
    own.end_round(own.shared.weight.detach().clone(), own.shared.bias.detach().clone())
    v = own.own.head.weight.sum(dim=0)
    condition = f * v / v.norm()
    pair = own.policy(condition).view(5, 2, 4)
    r, s = functional.softmax(pair, dim=1).unbind(1)
    expected = own.own.head(r * f) + own.shared(s * f)
    torch.testing.assert_close(own(f), expected)


def test_it_draws_the_policy_in_training_as_gumbel_softmax_does() -> None:
    own, f = head(), torch.randn(1, 4).repeat(20_000, 1)
    own.train()
    with torch.no_grad():
        found = own.compute_policy(f)
        v = own.own.vector
        pair = own.policy(f * v / v.norm()).view(len(f), 2, 4)
        expected = functional.gumbel_softmax(pair, tau=1.0, dim=1)[:, 0]
    assert found.std(dim=0).min() > 0.1
    for q in (0.1, 0.5, 0.9):
        torch.testing.assert_close(found.quantile(q, dim=0), expected.quantile(q, dim=0), atol=0.03, rtol=0)


def test_the_shared_head_learns_nothing_within_a_round_and_is_then_the_mean_with_the_own_one() -> None:
    own = head().train()
    own(torch.randn(6, 4)).square().sum().backward()
    assert own.shared.weight.grad is None
    assert own.own.head.weight.grad is not None
    before = own.shared.weight.detach().clone(), own.shared.bias.detach().clone()
    with torch.no_grad():
        own.own.head.weight += 1.0
        own.shared.weight.zero_()  # whatever an optimizer may do, such as decay
    own.end_round(*before)
    np.testing.assert_allclose(own.shared.weight.detach(), before[0] + 0.5, atol=1e-6)
    np.testing.assert_allclose(own.own.vector, own.own.head.weight.detach().sum(dim=0))
