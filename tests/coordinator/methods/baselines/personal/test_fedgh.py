from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from coordinator.methods.baselines.personal.fedgh import FedGh, train_head
from coordinator.methods.rounds import select_updates
from coordinator.methods.settings import MethodSettings
from fedge.steps.personal.train_gh import MEANS, PRESENT, make_means_layout
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import HEAD, unflatten
from tests.support.simulation import digits, rounds


def test_a_pass_over_the_means_is_torchs() -> None:
    rng = np.random.default_rng(1)
    means, labels = rng.normal(size=(5, 4)), np.array([0, 2, 1, 2, 0])
    head = nn.Linear(4, 3)
    before = torch.cat([p.detach().ravel() for p in head.parameters()]).numpy().copy()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.3)
    drawn = np.random.default_rng(7).permutation(5)
    for batch in (drawn[:2], drawn[2:4], drawn[4:]):
        optimizer.zero_grad()
        x, y = torch.tensor(means[batch], dtype=torch.float32), torch.tensor(labels[batch])
        nn.functional.cross_entropy(head(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = torch.cat([p.detach().ravel() for p in head.parameters()]).numpy()
    found = train_head(before, means, labels, rate=0.3, batch_size=2, rng=np.random.default_rng(7))
    np.testing.assert_allclose(found, after, atol=1e-6)


async def test_a_round_moves_the_head_by_what_the_devices_told_and_no_base_leaves(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=300)
    method = FedGh(MethodSettings(sgd=Sgd(steps=4), options={"head_rate": 0.5}))
    state = await rounds(method, method.init(layout, first), fleet)
    sent = make_means_layout(layout)
    updates = select_updates({answer.device_id: answer for answer in fleet.heard})
    told = [unflatten(fleet.get(update.update, sent), sent) for update in updates.values()]
    means = np.concatenate([one[MEANS][np.flatnonzero(one[PRESENT])] for one in told])
    labels = np.concatenate([np.flatnonzero(one[PRESENT]) for one in told])
    head = layout.select(HEAD)
    before = fleet.get(first, layout).params[-head.n_params :]
    expected = train_head(before, means, labels, rate=0.5, batch_size=32, rng=np.random.default_rng((0, 1)))
    np.testing.assert_allclose(fleet.get(state.model, head).params, expected, atol=1e-6)
    assert np.abs(expected - before).max() > 1e-3
    whole = fleet.get(state.whole, layout).params
    np.testing.assert_array_equal(whole[: -head.n_params], fleet.get(first, layout).params[: -head.n_params])
