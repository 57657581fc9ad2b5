"""DBE: a vector that is added to the features stays on the device; the shared features' mean is drawn to a global one.

Source: Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023;
baselines.md section 10. Round 1 is FedAvg's. At its end every device reports the mean of its features once, under the
new global model; the mean of these reports, weighted by samples, is fixed as g. If no device answers, the next round is
like the first.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from coordinator.aggregation.guarded import average_by_rule
from coordinator.aggregation.protection import explain_no_noise
from coordinator.fleet.fleet import Fleet
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.parts.cohort import NO_CLUSTERS
from coordinator.methods.rounds import select_results
from fedge.errors import ConfigError
from fedge.steps.descriptions.mean_features import MAX_FEATURES, FeaturesMeasured, MeanFeatures
from fedge.steps.training.train import Train
from fedge.steps.training.train_dbe import TrainDbe
from fedge.tensors.codecs import compute_norms
from fedge.tensors.layout import HEAD, Layout, Model, TensorInfo
from fedge.wire.messages import BlobRef


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of DBE. `kappa`: weight of the regulariser."""

    kappa: Annotated[float, Meta(ge=0)] = 1.0


class DbeState(PersonalState, frozen=True, kw_only=True):
    """The state of DBE. `global_mean`: g (D,), once it is measured."""

    global_mean: BlobRef | None = None


class Dbe(PersonalLayers[DbeState]):
    """DBE: base and head travel, and the prediction is Hd(B(x) + P_i)."""

    name = "dbe"
    State: ClassVar[type[DbeState]] = DbeState
    Options: ClassVar[type[Struct]] = Options
    needs_head = True
    REFUSED = NO_CLUSTERS | {
        "feature_momentum": "the mean is that of the present batch, which is momentum 1; kappa says how much it counts",
        "dp": explain_no_noise((MeanFeatures, "mean"), (TrainDbe, "update")),
    }

    def init(self, layout: Layout, model: BlobRef) -> DbeState:
        """Return the state before round 1.

        Raises:
            ConfigError: the network has no linear layer as its last one, or more features than a message takes.
        """
        state = super().init(layout, model)
        if (d := count_features(layout)) > MAX_FEATURES:
            raise ConfigError(
                f"dbe sends the mean of all features: the network has {d}, at most {MAX_FEATURES} fit into a message"
            )
        return state

    def make_step(self, state: DbeState, **common: Any) -> Train:
        """Make the order of the next round; the vector P_i learns once g is known."""
        if state.global_mean is None:
            return Train(**common)
        return TrainDbe(global_mean=state.global_mean, kappa=self.options.kappa, **common)

    async def round(self, state: DbeState, fleet: Fleet) -> DbeState:
        """Do one round of training; the first ends with the measurement of g."""
        after = await super().round(state, fleet)
        if after.global_mean is not None:
            return after
        return msgspec.structs.replace(after, global_mean=await self._measure_mean(after, fleet))

    async def _measure_mean(self, state: DbeState, fleet: Fleet) -> BlobRef | None:
        """Return the mean of all features, g = sum_j (N_j / N) mean features of device j; None without answers."""
        order = MeanFeatures(model=state.model)
        answers = await fleet.run("mean", {device.id: order for device in fleet.get_devices()})
        d, largest = count_features(state.layout), np.finfo(np.float32).max
        found = [
            result
            for result in select_results(answers, FeaturesMeasured).values()
            if result.n_samples and len(result.mean) == d and (np.abs(result.mean) <= largest).all()
        ]
        if not found:
            return None
        nothing = np.zeros(0, np.float32), np.zeros(0, np.int64)
        means = [Model(np.asarray(result.mean, np.float32), *nothing) for result in found]
        (g,) = average_by_rule(
            means,
            [compute_norms(mean) for mean in means],
            [result.n_samples for result in found],
            [range(len(found))],
            Layout(tensors=(TensorInfo(name="mean", shape=(d,)),)),
            self.settings.protection,
        )
        assert g is not None
        return fleet.put({"mean": g.params.astype(np.float32)})


def count_features(layout: Layout) -> int:
    """Return D, the number of the head's inputs."""
    return layout.select(HEAD).tensors[0].shape[1]
