"""IFCA: k models go to every device, which trains the one with the smallest loss on its samples.

Source: Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1 with model
averaging (option II); baselines.md section 19. In each round device i chooses

    j_i = argmin_j F_i(theta_j)

on the samples that it trains on, trains theta_{j_i}, and the server averages in each cluster. At the end every device
chooses once more. The paper starts k models at random: model 0 is the common initial model, and in the others the
numbers of each tensor are shuffled, which draws from the same distribution; if the task names initial weights, only
those of the head.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.method import Method
from coordinator.methods.parts.averaging import average_by_cluster
from coordinator.methods.parts.cohort import NO_CLUSTERS, SELECTIONS, ChoosingState, train_cohort
from coordinator.methods.parts.server_optimizer import apply
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round, run_with_retries, select_updates
from fedge.models.weights import find_weights
from fedge.steps.training.train import MAX_STARTS, Start, Train
from fedge.tensors.layout import HEAD, Layout, unflatten
from fedge.wire.messages import BlobRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.fleet.fleet import Fleet
    from fedge.tensors.layout import Tensors


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of IFCA. `n_clusters`: k, the number of models."""

    n_clusters: Annotated[int, Meta(ge=1, le=MAX_STARTS)] = 3


class IfcaState(ChoosingState, frozen=True, kw_only=True):
    """The state of IFCA. `model`: the initial model; `models`: theta_j, none before round 1.

    `clusters`: j_i of the last choice, by device.
    """

    model: BlobRef
    models: tuple[BlobRef, ...] = ()
    clusters: dict[str, int] = {}


class Ifca(Method[IfcaState]):
    """IFCA, Algorithm 1; at the end every device installs the model that it chooses."""

    name = "ifca"
    HEEDS = SHARED
    SELECTIONS = SELECTIONS
    State = IfcaState
    Options: ClassVar[type[Struct]] = Options
    REFUSED = NO_CLUSTERS | {
        "clustering": "each device chooses its cluster by its own losses",
        "dp": explain_no_noise((Train, "cluster")),
    }

    def add_classes(self, state: IfcaState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> IfcaState:
        """Return the state for a network with further outputs."""
        models = tuple(grow(model) for model in state.models)
        return msgspec.structs.replace(state, layout=layout, model=grow(state.model), models=models, descents={})

    async def round(self, state: IfcaState, fleet: Fleet) -> IfcaState:
        """Do one round of Algorithm 1."""
        if not state.models:
            state = msgspec.structs.replace(state, models=self.draw_models(state, fleet))
        order = self.make_order(state)
        state, asked, updates = await train_cohort(self, state, fleet, state.model, lambda _: order)
        chosen = {i: u.cluster for i, u in updates.items()}
        models = state.models
        if len(updates) >= self.settings.min_reports:
            members = [[i for i, k in chosen.items() if k == j] for j in range(len(models))]
            means = await average_by_cluster(self, fleet, updates, members, state.layout)
            models = tuple(apply(model, mean, state.layout, fleet) for model, mean in zip(models, means, strict=True))
        return finish_round(state, asked, updates, models=models, clusters=state.clusters | chosen)

    def make_order(self, state: IfcaState) -> Train:
        """Make the order of a round, which offers all models."""
        starts = tuple(Start(model=model, cluster=j) for j, model in enumerate(state.models))
        return Train(starts=starts, sgd=self.settings.sgd, codec=self.settings.codec, choose="training_loss")

    def draw_models(self, state: IfcaState, fleet: Fleet) -> tuple[BlobRef, ...]:
        """Draw the k initial models."""
        first = unflatten(fleet.get(state.model, state.layout), state.layout)
        given = self.server.task is not None and find_weights(self.server.task) is not None
        random = state.layout.select(HEAD) if given else state.layout
        rng = np.random.default_rng(self.settings.seed)
        others = (fleet.put(first | randomise_tensors(first, random, rng)) for _ in range(1, self.options.n_clusters))
        return (state.model, *others)

    async def finish(self, state: IfcaState, fleet: Fleet) -> IfcaState:
        """Have every device choose among the models, by an order to train of no steps, and install its choice."""
        if len(state.models) > 1:
            order = self.make_order(state)
            look = msgspec.structs.replace(
                order, sgd=msgspec.structs.replace(order.sgd, steps=0, epochs=0), measure=False
            )
            answers = await run_with_retries(fleet, "choose", dict.fromkeys([d.id for d in fleet.get_devices()], look))
            chosen = {i: u.cluster for i, u in select_updates(answers).items()}
            state = msgspec.structs.replace(state, clusters=state.clusters | chosen)
        return await super().finish(state, fleet)

    def get_model(self, state: IfcaState, device_id: str) -> BlobRef:
        """Return the model of the device's last choice; for an unknown device, that of the largest cluster."""
        if not state.models:
            return state.model
        sizes = Counter(state.clusters.values())
        largest = max(range(len(state.models)), key=lambda j: (sizes[j], -j))
        return state.models[state.clusters.get(device_id, largest)]

    def summarise(self, state: IfcaState) -> dict[str, Any]:
        """Return the figures of every method, with the devices of each cluster."""
        members = {str(j): sorted(i for i, k in state.clusters.items() if k == j) for j in range(len(state.models))}
        clusters = {j: own for j, own in members.items() if own}
        return super().summarise(state) | {"clusters": clusters, "split": len(clusters) > 1}


def randomise_tensors(tensors: Tensors, part: Layout, rng: np.random.Generator) -> Tensors:
    """Return the trainable tensors of a part, each with its numbers in another order."""
    return {
        info.name: rng.permutation(tensors[info.name].ravel()).reshape(info.shape) for info in part.select_kind("param")
    }
