"""FedGH: bases stay on the devices; the server trains the shared head on the mean features of the devices' classes.

Source: Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM Multimedia 2023,
Algorithm 1; baselines.md section 21.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coordinator.aggregation.protection import explain_no_noise
from coordinator.fleet.fleet import Fleet
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.parts.cohort import NO_CLUSTERS, train_cohort
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round, make_round_rng
from fedge.steps.personal.train_gh import MEANS, PRESENT, TrainGh, make_means_layout
from fedge.tensors.layout import BASE, Codec, Floats, Layout, Model, unflatten


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of FedGH. `head_rate`: eta_theta, learning rate of the head on the server."""

    head_rate: Annotated[float, Meta(gt=0, le=100)] = 0.1


class FedGh(PersonalLayers[PersonalState]):
    """FedGH: the head travels down, class means travel up."""

    name = "fedgh"
    personal = BASE
    Options: ClassVar[type[Struct]] = Options
    CLASSES = "trains the shared head on the mean features of classes"
    HEEDS = SHARED - {"average"}
    REFUSED = NO_CLUSTERS | {
        "dp": explain_no_noise((TrainGh, "update")),
        "top-k": "devices send the mean features of their classes, which are few",
    }

    def explain_no_relays(self) -> str:
        """Return why devices cannot be behind relays."""
        return "the server learns from the class means of each device"

    def make_step(self, state: PersonalState, **common: Any) -> TrainGh:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round; class means travel in float32."""
        return TrainGh(**common | {"codec": Codec.FLOAT32})

    async def train_shared(self, state: PersonalState, fleet: Fleet, layout: Layout) -> PersonalState:
        """Have the cohort train, and the head learn from what the devices tell."""
        order = self.make_order(state)
        state, asked, updates = await train_cohort(self, state, fleet, state.model, lambda _: order)
        model = state.model
        if updates and len(updates) >= self.settings.min_reports:
            sent = make_means_layout(state.layout)
            told = [unflatten(fleet.get(update.update, sent), sent) for update in updates.values()]
            present = [np.flatnonzero(one[PRESENT]) for one in told]
            head = fleet.get(state.model, layout)
            learned = train_head(
                head.params,
                np.concatenate([one[MEANS][own] for one, own in zip(told, present, strict=True)]),
                np.concatenate(present),
                rate=self.options.head_rate,
                batch_size=self.settings.sgd.batch_size,
                rng=make_round_rng(self.settings, state.round + 1),
            )
            model = fleet.put_model(Model(learned, head.buffers, head.counters), layout)
        return finish_round(state, asked, updates, model=model)


def train_head(
    head: Floats,
    means: NDArray[np.floating],
    labels: NDArray[np.int64],
    *,
    rate: float,
    batch_size: int,
    rng: np.random.Generator,
) -> Floats:
    """Train a head for one pass over class means, by plain SGD on the cross-entropy.

    Args:
        head: its weight (C, D) and bias (C,), as one vector.
        means: mean features, (m, D), by ascending device and class; m >= 1.
        labels: the class of each, (m,).
        rate: eta_theta > 0.
        batch_size: means in a step, at least 1.
        rng: draws the order of the means.

    Source: FedGH, Algorithm 1, line 10.

    Example: two classes, one feature, weights and biases 0. The mean (2) of class 0 has p = (1/2, 1/2):
        >>> rng = np.random.default_rng(0)
        >>> zero = np.zeros(4, np.float32)
        >>> train_head(zero, np.array([[2.0]]), np.array([0]), rate=0.1, batch_size=8, rng=rng)
        array([ 0.1 , -0.1 ,  0.05, -0.05], dtype=float32)
    """
    d = means.shape[1]
    w_b = head.astype(np.float64)
    weight, bias = w_b[: -len(head) // (d + 1)].reshape(-1, d), w_b[-len(head) // (d + 1) :]
    drawn = rng.permutation(len(labels))
    for start in range(0, len(labels), batch_size):
        batch = drawn[start : start + batch_size]
        logits = means[batch] @ weight.T + bias
        excess = np.exp(logits - logits.max(axis=1, keepdims=True))
        excess /= excess.sum(axis=1, keepdims=True)
        excess[np.arange(len(batch)), labels[batch]] -= 1
        weight -= rate * excess.T @ means[batch] / len(batch)
        bias -= rate * excess.mean(axis=0)
    return w_b.astype(np.float32)
