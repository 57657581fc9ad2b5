from __future__ import annotations

import torch
from torch import nn

from fedge.models.layers.valve import ValveHead


def head() -> ValveHead:
    torch.manual_seed(1)
    return ValveHead(nn.Linear(4, 3)).eval()


def test_it_answers_from_personal_features_as_the_authors_code_does() -> None:
    own, f, shares = head(), torch.randn(5, 4), torch.tensor([0.5, 0.0, 0.5])
    own.freeze(shares)
    p = (own.embeddings[0] + own.embeddings[2]) / 2
    features = torch.relu((own.gamma(p) + 1) * f + own.beta(p))
    torch.testing.assert_close(own(f), own.own.head(features))


def test_in_training_the_condition_is_made_of_embeddings_as_they_were_and_they_learn_nothing_from_it() -> None:
    own, f = head(), torch.randn(5, 4)
    fixed = own.freeze(torch.tensor([1.0, 0.0, 0.0]))
    before = own(f)
    own.train()
    with torch.no_grad():
        own.embeddings += 1.0
    torch.testing.assert_close(own(f), before)
    own(f).sum().backward()
    assert own.embeddings.grad is None
    torch.testing.assert_close(fixed, own.embeddings.detach() - 1.0)
    own.eval()
    assert not torch.allclose(own(f), before), "outside of training the present embeddings count"
