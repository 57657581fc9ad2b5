"""fedge, steps 4 to 8: every device gets a calibrated mixture of the models that it was offered and its own.

Source: docs/methods/fedge.md, sections 6 to 14. Devices fit candidates, weights, energy and gate; the server pools sums
of losses and weights, and sees no sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

import msgspec
import numpy as np

from coordinator.aggregation.pooled import pooled_choice, pooled_weights
from coordinator.fleet.fleet import Fleet
from coordinator.methods.method import Method
from coordinator.methods.papers.fedge_experts import offered
from coordinator.methods.papers.fedge_groups import seen_anew
from coordinator.methods.papers.fedge_state import FedgeState, Pool
from coordinator.methods.parts.unresponsive import ask, awake
from coordinator.methods.rounds import results, round_rng, steps_alone
from coordinator.selection.select import cohort_size, uniform
from coordinator.store.records import Device
from fedge.bundle.calibration import BETAS, grid
from fedge.steps.mixture.fit_candidates import CandidatesFitted, FitCandidates
from fedge.steps.mixture.fit_energy import EnergyFitted, FitEnergy
from fedge.steps.mixture.fit_gate import FitGate
from fedge.steps.mixture.fit_weights import Calibration, FitWeights, WeightsFitted
from fedge.steps.mixture.install import Installed
from fedge.wire.messages import Role

PILOTS, PILOT_SHARE = 10, 0.1  # at least so many devices, and so many of all, section 14
A0 = 10.0  # shrinkage of the weights that are pooled, samples, section 8
ENOUGH_VALIDATION = 30  # samples in the whole federation below which nothing is pooled, section 12


class Mixtures(Method[FedgeState]):
    """A method whose rounds left a global model and perhaps experts, and whose devices end in mixtures of them."""

    SHRINKAGE: ClassVar[float] = 20.0
    """a of the devices' own weights, in samples (section 8)."""
    WEIGHT_TURNS: ClassVar[tuple[str, ...]] = ("weights-1", "weights-2")
    """How often the pooled weights move to the mean of the devices' (section 8)."""
    LOCAL: ClassVar[bool] = True
    """Whether there is a local model to try."""

    async def personalise(self, state: FedgeState, fleet: Fleet, r: int) -> FedgeState:
        """Sections 6 to 11: devices fit candidates, weights, energy and gate; sums of losses and weights are pooled.

        Unresponsive devices that took part are asked once more: without a mixture, all of their work is lost.
        """
        asked = awake(state, fleet).keys() | state.participations.keys()
        devices = {device.id: device for device in fleet.devices() if device.id in asked}
        pilots = self._pilots(list(devices), r)
        fits = {i: self.fit(state, device, local=i in pilots) for i, device in devices.items()}
        state, answers = await ask(state, fleet, "candidates", fits, insisting=True)
        fitted = results(answers, CandidatesFitted)
        if not fitted:
            return state
        told = {role for fit in fitted.values() for role in fit.losses} or {Role.PRIVATE, Role.GLOBAL}
        roles: list[Role] = sorted(told, key=list(Role).index)
        n_validation = sum(fit.n_validation for fit in fitted.values() if fit.losses)
        pooling = n_validation >= ENOUGH_VALIDATION
        calibration = {role: self.calibrate(role, fitted.values(), pooling=pooling) for role in roles}
        mixed = self.mixed(roles)
        weighing = pooling and len(mixed) > 1

        # Section 8: u without and with the local model, moved twice to the mean of the devices' weights. Only devices
        # that have a local model vote on the variant with it.
        variants: list[list[Role]] = [[role for role in mixed if role is not Role.LOCAL], mixed]
        pooled = tuple({role: 1 / len(present) for role in present} for present in variants)
        for turn in self.WEIGHT_TURNS if weighing else ():
            order = FitWeights(calibration=calibration, pooled=pooled, shrinkage=A0)
            state, answers = await ask(state, fleet, turn, {i: order for i in fitted if i not in state.unresponsive})
            weighed = results(answers, WeightsFitted)
            pooled = tuple(
                pooled_weights([(w.weights[v], w.n_validation) for w in voters]) if voters else pooled[v]
                for v, voters in enumerate((list(weighed.values()), [w for i, w in weighed.items() if i in pilots]))
            )

        # Sections 8 and 9: whether the local model pays, and how much the energy counts.
        measured: dict[str, EnergyFitted] = {}
        if weighing:
            energy = FitEnergy(calibration=calibration, pooled=pooled, shrinkage=self.SHRINKAGE)
            present = {i: energy for i in fitted if i not in state.unresponsive}
            state, answers = await ask(state, fleet, "energy", present)
            measured = results(answers, EnergyFitted)
        piloted = [m for i, m in measured.items() if i in pilots]
        local = self.takes_local(mixed, piloted)
        beta = self.beta([m.beta_losses[local] for m in (piloted if local else measured.values())])

        pool = Pool(calibration=calibration, weights=pooled[local], beta=beta, local=local, n_validation=n_validation)
        if pool.local and (late := [i for i in fitted if i not in pilots]):
            state, _ = await ask(state, fleet, "local", {i: self.fit(state, devices[i], local=True) for i in late})
        finish = {i: self.mixture(pool, fit) for i, fit in fitted.items()}
        state, answers = await ask(state, fleet, "gate", finish, insisting=True)
        return msgspec.structs.replace(state, pool=pool, installed=results(answers, Installed))

    async def admit(self, state: FedgeState, fleet: Fleet, pool: Pool) -> FedgeState:
        """Section 12: a late joiner fits its candidates with the pooled settings, without any round.

        So does a device whose data drifted, after it was profiled and placed again; its new bundle has a higher
        release, and so replaces the old one.
        """
        state = await seen_anew(state, fleet)
        new = [device for device in fleet.devices() if device.id not in state.installed or device.drift]
        local = pool.local or (self.LOCAL and not self.options.local_pilot)
        fits = {device.id: self.fit(state, device, local=local) for device in new}
        state, answers = await ask(state, fleet, "candidates", fits, insisting=True)
        finish = {i: self.mixture(pool, fit) for i, fit in results(answers, CandidatesFitted).items()}
        state, answers = await ask(state, fleet, "gate", finish, insisting=True)
        installed = state.installed | results(answers, Installed)
        return msgspec.structs.replace(state, installed=dict(sorted(installed.items())))

    def _pilots(self, ids: Sequence[str], r: int) -> Sequence[str]:
        """The devices that fit a local model first; with `local_pilot` a random tenth, at least ten (section 14)."""
        if not self.LOCAL:
            return ()
        if not self.options.local_pilot:
            return ids
        return uniform(ids, max(PILOTS, cohort_size(len(ids), PILOT_SHARE)), round_rng(self.settings, r))

    def fit(self, state: FedgeState, device: Device, *, local: bool) -> FitCandidates:
        """The order to fit candidates; a device that never trained fits for the median number of rounds.

        `local`: whether it also fits a local model.
        """
        typical = round(float(np.median(list(state.participations.values())))) if state.participations else 0
        rounds = state.participations.get(device.id, typical)
        return FitCandidates(
            global_model=state.shared.model,
            experts=offered(state, device.id) if state.experts else (),
            initial_model=state.initial_model,
            sgd=self.settings.sgd,
            local_steps=steps_alone(device, self.settings.sgd) * rounds if local else 0,
        )

    def calibrate(self, role: Role, fitted: Iterable[CandidatesFitted], *, pooling: bool) -> Calibration:
        """Section 7: the (T, kappa) with the smallest pooled loss; section 12's if there are too few samples."""
        if not pooling:
            return Calibration(temperature=1.0, kappa=1.0 if role.is_shared else 0.0)
        points = grid(role)
        allowed = [n for n, point in enumerate(points) if self.allows(role, point)]
        losses = [result.losses[role] for result in fitted if role in result.losses]
        return points[allowed[pooled_choice([[sums[n] for n in allowed] for sums in losses])]]

    def allows(self, role: Role, point: Calibration) -> bool:  # noqa: ARG002 - for variants
        """Whether a point of the grid may be chosen."""
        return True

    def mixed(self, roles: list[Role]) -> list[Role]:
        """The candidates of the mixture, at least one."""
        return roles

    def takes_local(self, mixed: Collection[Role], piloted: Sequence[EnergyFitted]) -> bool:  # noqa: ARG002
        """Section 8: whether the mixture has the local model."""
        return bool(piloted) and bool(pooled_choice([m.pooled_losses for m in piloted]))

    def beta(self, losses: Sequence[Sequence[float]]) -> float:
        """Section 9: how much the energy counts, by the devices' losses for each beta of the grid."""
        return BETAS[pooled_choice(losses)] if losses else 0.0

    def mixture(self, pool: Pool, fitted: CandidatesFitted) -> FitGate:
        """The last step on a device, with the pooled settings; without any of the candidates, the global model.

        A device that may not report losses has at least the global and the private model.
        """
        has = fitted.losses.keys() or {Role.PRIVATE, Role.GLOBAL}
        weights = pool.weights if pool.weights.keys() & has else {Role.GLOBAL: 1.0}
        return FitGate(
            calibration={role: pool.calibration[role] for role in weights},
            pooled=weights,
            shrinkage=self.SHRINKAGE,
            beta=pool.beta,
            sgd=self.settings.sgd,
        )
