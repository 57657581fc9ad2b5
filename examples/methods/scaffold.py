"""SCAFFOLD: control variates correct each local step for what is particular to a device's samples.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1,
option II. A device takes K steps y <- y - lr (g - c_i + c) from y = x, sets c_i+ = c_i - c + (x - y) / (K lr), and
sends dy = y - x and dc = c_i+ - c_i. The server moves x by the mean dy, and c by 1/N sum dc. Steps are plain SGD.

    export PYTHONPATH=examples
    fedge compare --alpha 0.1 --methods fedavg,methods.scaffold:Scaffold
    fedge coordinator --broker localhost:1883 --federation f --home s --task digits --method methods.scaffold:Scaffold
    fedge agent --broker localhost:1883 --federation f --id cam1 --home cam1 --task digits --data cam1.npz \
        --steps methods.scaffold:TrainScaffold
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

import fedge.steps as fs
from coordinator.methods import Method, ModelState, apply, average, finish_round, select_updates

if TYPE_CHECKING:
    from edge_agent.steps import Device, Learned


class TrainedScaffold(fs.Trained, frozen=True, kw_only=True):
    """The result: the update dy, and in `control` dc."""

    REVEALS: ClassVar = {**fs.Trained.REVEALS, "control": fs.Reveals.UPDATE}
    control: fs.BlobRef


class TrainScaffold(fs.Train, frozen=True, kw_only=True):
    """The contract: `Train` with the server's control variate c, which is zero if None."""

    STEP: ClassVar = "train_scaffold"
    RESULT: ClassVar = TrainedScaffold
    DEVICE: ClassVar = __name__
    control: fs.BlobRef | None = None

    def uploads(self, result, layout):
        """Return both uploads with their layouts."""
        return {**super().uploads(result, layout), result.control: select_params(layout)}

    @staticmethod
    def select_kept(_, layout):
        """Return the layout of what stays: c_i, and the c_i before, to which the device returns if nothing counted."""
        return fs.Layout(tensors=tuple(fs.TensorInfo(name=n, shape=(layout.n_params,)) for n in ("now", "before")))


def select_params(layout: fs.Layout) -> fs.Layout:
    """Return the layout of a control variate: the trainable tensors."""
    return fs.Layout(tensors=layout.select_kind("param"))


class ScaffoldState(ModelState, frozen=True, kw_only=True):
    """`model` is x, `control` is c, which is zero if None."""

    control: fs.BlobRef | None = None


class Scaffold(Method[ScaffoldState]):
    """The server half of Algorithm 1."""

    name, steps, State = "scaffold", (TrainScaffold,), ScaffoldState
    HEEDS = frozenset({"participation", "min_reports", "average"})
    PLAIN: ClassVar = dict.fromkeys(("optimizer", "nesterov", "clip_norm"), "control variates are those of plain SGD")
    REFUSED: ClassVar = {"dp": "control variates are sent without noise", **PLAIN}

    async def round(self, state, fleet):
        """Move x, and c even if x stays: devices whose reports were accepted have moved their c_i."""
        sgd, start = msgspec.structs.replace(self.settings.sgd, momentum=0.0), fs.Start(model=state.model)
        order = TrainScaffold(starts=(start,), sgd=sgd, codec=self.settings.codec, control=state.control)
        answers = await fleet.run("train", dict.fromkeys(self.draw_cohort(state, fleet), order))
        updates, x = select_updates(answers), state.model
        if len(updates) >= self.settings.min_reports:
            mean = await average(self, fleet, updates, state.layout, alike=True)  # not weighted by samples
            x = apply(x, mean, state.layout, fleet)
        part = select_params(state.layout)
        c = np.zeros(part.n_params) if state.control is None else fleet.get(state.control, part).params
        c = c + sum(fleet.get(update.control, part).params for update in updates.values()) / len(fleet.get_devices())
        control = fleet.put_model(fs.Model(c.astype(np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64)), part)
        return finish_round(state, len(answers), updates, model=x, control=control)


def run(device: Device, action: TrainScaffold) -> fs.Result:
    """Train with control variates."""
    from edge_agent.steps import train_alone

    counted = device.was_counted()  # to be asked in every order
    return train_alone(device, action, lambda x, mine: learn(device, action, x, mine, counted))


def learn(device: Device, action: TrainScaffold, x: fs.Model, mine: fs.Layers | None, counted: bool | None) -> Learned:
    """Compute y and c_i+, as in lines 5 to 14 of Algorithm 1."""
    from edge_agent.steps import Learned, Momentum, Recipe, fit, send_update, to_tensor

    network, sgd, part = device.network, action.sgd, select_params(device.layout)
    c = 0 * x.params if action.control is None else device.fetch_model(action.control, part).params
    c_i = 0 * x.params if mine is None else mine["before" if counted is False else "now"]
    correction = to_tensor(c - c_i, network.processor)

    class Corrected(Momentum):
        def step(self, weights, gradient):
            super().step(weights, gradient.add_(correction))

    network.load(x)
    fit(network, [device], Recipe(sgd, optimizer=lambda _: Corrected(sgd)))
    y = network.dump()
    new = c_i - c + (x.params - y.params) / np.float32(sgd.count_steps(device.data.n_shared) * sgd.learning_rate)
    sent = send_update(device, fs.Model(new - c_i, y.buffers, y.counters), part, fs.Codec.FLOAT32)
    kept = fs.flatten({"now": new, "before": c_i}, action.select_kept((), device.layout))
    return Learned(y, kept=kept, report={"control": sent})


def overlay(model: fs.Model, *_: object) -> fs.Model:
    """Return the model itself, since control variates are no layers."""
    return model
