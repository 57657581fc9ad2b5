"""FedPAC: features drawn to the global class means, heads that each device gets as a mixture of its own of all heads.

Source: Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR
2023, Algorithm 1. A rival for tables, no method for a fleet: every update tells what classes a device has.

A device takes the mean base and its own head; the head learns alone for one epoch, then the base alone, with
lambda mean (f - c_y)^2 in the loss, where c are the class means of the round before (none in the first). It sends both,
the class means m_c of what it learned with the counts, and of the model that it was sent h_c = p_c m_c, where p_c is
the share of class c, and V = (sum_c p_c E|f|^2 - sum_c |h_c|^2) / n. The server averages the bases, makes c, and head i
is sum_j alpha_j head_j with the alpha on the simplex that minimises

    sum_j alpha_j^2 V_j + sum_c |sum_j alpha_j (h_i,c - h_j,c)|^2.

Departures: the class means are weighted by counts; a device that sat out keeps its head.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from scipy.optimize import nnls

from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.method import Method
from coordinator.methods.parts.averaging import average
from coordinator.methods.parts.cohort import NO_CLUSTERS, SELECTIONS, train_cohort
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round
from fedge.steps.contract import Result, Reveals
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import BASE, HEAD, Layout, Model, TensorInfo, unflatten
from fedge.wire.messages import BlobRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from coordinator.fleet.fleet import Fleet
    from edge_agent.device.device import Device

Array = NDArray[np.float64]


class TrainedPac(Trained, frozen=True, kw_only=True):
    """`statistics`: tensors `h` (C, D), `v` (1), `means` (C, D), `counts` (C)."""

    REVEALS: ClassVar = {**Trained.REVEALS, "statistics": Reveals.LABELS}
    statistics: BlobRef


class TrainPac(Train, frozen=True, kw_only=True):
    """`means`: c (C, D), NaN where no device has the class; `pull`: lambda."""

    STEP: ClassVar = "train_pac"
    RESULT: ClassVar = TrainedPac
    DEVICE: ClassVar = __name__

    means: tuple[tuple[float, ...] | None, ...]
    pull: float

    def uploads(self, result: Trained, layout: Layout) -> Mapping[BlobRef, Layout]:
        """The statistics, too."""
        assert isinstance(result, TrainedPac)
        return {**super().uploads(result, layout), result.statistics: statistics_of(layout)}


def statistics_of(layout: Layout) -> Layout:
    """What the statistics of a network are."""
    c, d = layout.select(HEAD).tensors[0].shape
    shapes = {"h": (c, d), "v": (1,), "means": (c, d), "counts": (c,)}
    return Layout(tensors=tuple(TensorInfo(name=name, shape=shape) for name, shape in shapes.items()))


class PacOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`pull`: lambda."""

    pull: Annotated[float, Meta(ge=0)] = 1.0


class PacState(FedAvgState, frozen=True, kw_only=True):
    """`model`: the mean base and head; `own`: the devices' models; `means`: c."""

    own: dict[str, BlobRef] = {}
    means: tuple[tuple[float, ...] | None, ...] = ()


class FedPac(Method[PacState]):
    """The server half."""

    name = "fedpac"
    HEEDS = SHARED
    steps = (TrainPac,)
    Options: ClassVar[type[Struct]] = PacOptions
    SELECTIONS = SELECTIONS
    REFUSED: ClassVar[Mapping[str, str]] = NO_CLUSTERS

    def init(self, layout: Layout, model: BlobRef) -> PacState:
        """The state before round 1."""
        return PacState(round=0, layout=layout, model=model)

    def get_model(self, state: PacState, device_id: str) -> BlobRef:
        """The device's own model, or the mean of all."""
        return state.own.get(device_id, state.model)

    async def round(self, state: PacState, fleet: Fleet) -> PacState:
        """One round of Algorithm 1."""
        layout, n_base = state.layout, state.layout.select(BASE).n_params

        def order(device_id: str) -> TrainPac:
            start = Start(model=self.get_model(state, device_id))
            sgd, codec, pull = self.settings.sgd, self.settings.codec, self.options.pull
            return TrainPac(starts=(start,), sgd=sgd, codec=codec, means=state.means, pull=pull)

        state, asked, updates = await train_cohort(self, state, fleet, state.model, order)
        if len(updates) < self.settings.min_reports:
            return finish_round(state, asked, updates)
        mean = await average(self, fleet, updates, layout)
        assert mean is not None
        shared = mean.add_to(fleet.get(state.model, layout))
        starts = {i: fleet.get(self.get_model(state, i), layout).params[n_base:] for i in {*state.own, *updates}}
        trained = [starts[i] + fleet.get(u.update, layout).params[n_base:] for i, u in updates.items()]
        told = [fleet.get_tensors(u.statistics) for u in updates.values() if isinstance(u, TrainedPac)]
        h, v = (np.stack([own[name] for own in told]).astype(np.float64) for name in ("h", "v"))
        heads = dict(starts)
        for k, i in enumerate(updates):
            heads[i] = np.einsum("j,jp->p", shares(k, h, v[:, 0]), trained).astype(np.float32)

        def put(head: NDArray[np.float32]) -> BlobRef:
            params = np.concatenate([shared.params[:n_base], head])
            return fleet.put(unflatten(Model(params, shared.buffers, shared.counters), layout))

        return finish_round(
            state,
            asked,
            updates,
            model=put(np.mean(list(heads.values()), axis=0, dtype=np.float32)),
            own={i: put(head) for i, head in sorted(heads.items())},
            means=global_means(told),
        )


def shares(i: int, h: Array, v: Array) -> Array:
    """alpha (N,) of device i, from h (N, C, D) and V (N,): on the simplex.

    The objective is homogeneous, so non-negative least squares with one more row, sum alpha = 1, has the same minimum
    but for its length.
    """
    away = (h[i] - h).reshape(len(h), -1).T
    rows = np.vstack([np.diag(np.sqrt(v)), away, np.ones(len(h))])
    found, _ = nnls(rows, np.append(np.zeros(len(rows) - 1), 1.0))
    return np.asarray(found / found.sum())


def global_means(told: Sequence[Mapping[str, NDArray[Any]]]) -> tuple[tuple[float, ...] | None, ...]:
    """c: of each class the mean (D,) of the devices' means, by their counts; None where nobody has the class."""
    counts = np.stack([own["counts"] for own in told]).astype(np.float64)
    sums = np.einsum("ic,icd->cd", counts, np.stack([own["means"] for own in told]))
    return tuple(tuple((s / n).tolist()) if n else None for s, n in zip(sums, counts.sum(axis=0), strict=True))


def run(device: Device, action: TrainPac) -> Result:
    """The device half: the head alone, the base alone, and what the server is told."""
    import torch

    from edge_agent.learning.evaluation import Evaluation
    from edge_agent.learning.frame import Begun, Learned, begin, finish
    from fedge.models import network as models
    from fedge.models.problems.cross_entropy import cross_entropy
    from fedge.models.training import Trainer
    from fedge.tensors import codecs as codec
    from fedge.tensors.layout import Codec

    begun = begin(device, action)
    if not isinstance(begun, Begun):
        return begun
    (x, y), network, sgd, rng = device.data.shared, device.network, action.sgd, device.make_rng()
    start = begun.start
    h, v, _, _ = statistics(network.compute_features(start, x), y, device.task.n_classes)
    Trainer(network, x, y, sgd, rng, moves="head").run(msgspec.structs.replace(sgd, epochs=1).count_steps(len(y)))
    head = models.get_head(network.module, network.layout)
    unknown = (float("nan"),) * head.in_features
    with near_class_means(head, action.pull) as near:
        means = torch.tensor([own or unknown for own in action.means], device=network.processor)
        loss = partial(near, means=means) if action.means else cross_entropy
        Trainer(network, x, y, sgd, rng, loss=loss, moves="base").run(sgd.count_steps(len(y)), device.stop)
    trained = network.dump()
    _, _, own, counts = statistics(network.compute_features(trained, x), y, device.task.n_classes)
    told = {"h": h, "v": v, "means": own, "counts": counts}
    data = codec.encode({name: array.astype(np.float32) for name, array in told.items()}, Codec.FLOAT32)
    return finish(begun, Learned(trained, report={"statistics": device.send(data)}), Evaluation(None), None)


@contextmanager
def near_class_means(head: Any, weight: float) -> Iterator[Callable[..., Any]]:
    """Context with the loss cross-entropy + weight * mean over samples and features of (feature - class mean)^2.

    The loss gets the means (C, D) along with a batch. Samples of a class whose mean is NaN add nothing to the second
    term.
    """
    from torch.nn import functional

    seen: list[Any] = []

    def loss(module: Any, x: Any, y: Any, means: Any) -> Any:
        entropy = functional.cross_entropy(module(x), y)
        away = (seen.pop() - means[y]).nan_to_num()
        return entropy + weight * away.square().mean()

    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield loss
    finally:
        hook.remove()


def statistics(features: Array, y: NDArray[np.int64], n_classes: int) -> tuple[Array, Array, Array, Array]:
    """h (C, D), V (1,), the class means (C, D), 0 where there are none, and counts (C,), of features (n, D)."""
    of_class = np.eye(n_classes)[y].T
    counts = of_class.sum(axis=1)
    means = of_class @ features / np.maximum(counts, 1)[:, None]
    h = counts[:, None] / len(y) * means
    v = (np.square(features).sum() / len(y) - np.square(h).sum()) / len(y)
    return h, np.array([v]), means, counts
