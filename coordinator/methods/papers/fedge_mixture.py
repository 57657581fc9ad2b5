"""fedge, steps 4 to 8: every device gets a calibrated mixture of the models that it was offered and its own.

Source: docs/methods/fedge.md, sections 6 to 14. Devices fit candidates, weights, energy and gate; the server pools sums
of losses and weights, and sees no sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from coordinator.aggregation.pooled import choose_pooled, pool_means, pool_products, pool_weights, stack_weights
from coordinator.fleet.fleet import Fleet
from coordinator.methods.method import Method
from coordinator.methods.papers.fedge_experts import list_offered_experts
from coordinator.methods.papers.fedge_groups import profile_drifting
from coordinator.methods.papers.fedge_state import FedgeState, PooledSettings
from coordinator.methods.parts.unresponsive import find_responsive, run_and_record
from coordinator.methods.rounds import count_steps_alone, make_round_rng, select_results
from coordinator.selection.select import compute_cohort_size, draw_uniform
from coordinator.store.records import Device
from fedge.bundle.calibration import BETAS
from fedge.data.problems.calibration import Calibration
from fedge.steps.mixture.fit_candidates import CandidatesFitted, FitCandidates
from fedge.steps.mixture.fit_energy import EnergyFitted, FitEnergy
from fedge.steps.mixture.fit_gate import FitGate
from fedge.steps.mixture.fit_weights import FitWeights, Products, WeightsFitted
from fedge.steps.mixture.install import Installed
from fedge.wire.messages import Role

PILOTS, PILOT_SHARE = 10, 0.1  # at least so many devices, and so many of all, section 14
A0 = 10.0  # shrinkage of the weights that are pooled, samples, section 8
ENOUGH_VALIDATION = 30  # samples in the whole federation below which nothing is pooled, section 12


class Mixtures(Method[FedgeState]):
    """A method whose rounds leave a global model and perhaps experts, of which its devices finally make mixtures."""

    SHRINKAGE: ClassVar[float] = 20.0
    """a, the shrinkage of the devices' own weights, in samples (section 8)."""
    WEIGHT_TURNS: ClassVar[tuple[str, ...]] = ("weights-1", "weights-2")
    """Labels of the turns in which the pooled weights move to the mean of the devices' weights (section 8)."""
    LOCAL: ClassVar[bool] = True
    """Whether the mixture may have a local model."""

    async def personalise(self, state: FedgeState, fleet: Fleet, r: int) -> FedgeState:
        """Do sections 6 to 11: devices fit candidates, weights, energy and gate; losses and weights are pooled.

        Unresponsive devices that took part are asked once more, since without a mixture all of their work is lost.
        """
        asked = find_responsive(state, fleet).keys() | state.participations.keys()
        devices = {device.id: device for device in fleet.get_devices() if device.id in asked}
        pilots = self._draw_pilots(list(devices), r)
        fits = {i: self.make_fit_order(state, device, local=i in pilots) for i, device in devices.items()}
        state, answers = await run_and_record(state, fleet, "candidates", fits, insisting=True)
        fitted = select_results(answers, CandidatesFitted)
        if not fitted:
            return state
        used = {role for fit in fitted.values() for role in fit.losses} or {Role.PRIVATE, Role.GLOBAL}
        roles: list[Role] = sorted(used, key=list(Role).index)
        n_validation = sum(fit.n_validation for fit in fitted.values() if fit.losses)
        pooling = n_validation >= ENOUGH_VALIDATION
        calibration = {role: self.calibrate(role, fitted.values(), pooling=pooling) for role in roles}
        mixed = self.select_mixed(roles)
        weighing = pooling and len(mixed) > 1

        # Section 8: u without and with the local model, moved twice to the mean of the devices' weights. Only devices
        # that have a local model vote on the variant with it.
        variants: list[list[Role]] = [[role for role in mixed if role is not Role.LOCAL], mixed]
        pooled = tuple({role: 1 / len(present) for role in present} for present in variants)
        products: Products | UnsetType = UNSET
        for turn in self.WEIGHT_TURNS if weighing else ():
            order = FitWeights(calibration=calibration, pooled=pooled, shrinkage=A0)
            state, answers = await run_and_record(
                state, fleet, turn, {i: order for i in fitted if i not in state.unresponsive}
            )
            weighed = select_results(answers, WeightsFitted)
            products = pool_products([(w.products, w.n_validation) for w in weighed.values() if w.products]) or UNSET
            if not isinstance(products, UnsetType):  # a stack: one turn says all
                pooled = tuple(stack_weights(products, present) for present in variants)
                break
            pooled = tuple(
                pool_weights([(w.weights[v], w.n_validation) for w in voters]) if voters else pooled[v]
                for v, voters in enumerate((list(weighed.values()), [w for i, w in weighed.items() if i in pilots]))
            )

        # Sections 8 and 9: whether the local model pays, and how much the energy counts.
        measured: dict[str, EnergyFitted] = {}
        if weighing:
            energy = FitEnergy(calibration=calibration, pooled=pooled, shrinkage=self.SHRINKAGE, products=products)
            present = {i: energy for i in fitted if i not in state.unresponsive}
            state, answers = await run_and_record(state, fleet, "energy", present)
            measured = select_results(answers, EnergyFitted)
        piloted = [m for i, m in measured.items() if i in pilots]
        local = self.takes_local(mixed, piloted)
        beta = self.choose_beta([m.beta_losses[local] for m in (piloted if local else measured.values())])

        pool = PooledSettings(
            calibration=calibration,
            weights=pooled[local],
            beta=beta,
            local=local,
            n_validation=n_validation,
            products=products,
        )
        if pool.local and (late := [i for i in fitted if i not in pilots]):
            state, _ = await run_and_record(
                state, fleet, "local", {i: self.make_fit_order(state, devices[i], local=True) for i in late}
            )
        finish = {i: self.make_mixture_order(pool, fit) for i, fit in fitted.items()}
        state, answers = await run_and_record(state, fleet, "gate", finish, insisting=True)
        return msgspec.structs.replace(state, pool=pool, installed=select_results(answers, Installed))

    async def admit(self, state: FedgeState, fleet: Fleet, pool: PooledSettings) -> FedgeState:
        """Do section 12: late joiners fit their candidates with the pooled settings, without any round.

        So do devices whose data drifted, after they were profiled and placed again. Their new bundles have a higher
        release, and so replace the old ones.
        """
        state = await profile_drifting(state, fleet)
        new = [device for device in fleet.get_devices() if device.id not in state.installed or device.drift]
        local = pool.local or (self.LOCAL and not self.options.local_pilot)
        fits = {device.id: self.make_fit_order(state, device, local=local) for device in new}
        state, answers = await run_and_record(state, fleet, "candidates", fits, insisting=True)
        finish = {i: self.make_mixture_order(pool, fit) for i, fit in select_results(answers, CandidatesFitted).items()}
        state, answers = await run_and_record(state, fleet, "gate", finish, insisting=True)
        installed = state.installed | select_results(answers, Installed)
        return msgspec.structs.replace(state, installed=dict(sorted(installed.items())))

    def _draw_pilots(self, ids: Sequence[str], r: int) -> Sequence[str]:
        """Draw the devices that fit a local model first; with `local_pilot` a tenth, at least ten (section 14)."""
        if not self.LOCAL:
            return ()
        if not self.options.local_pilot:
            return ids
        return draw_uniform(
            ids, max(PILOTS, compute_cohort_size(len(ids), PILOT_SHARE)), make_round_rng(self.settings, r)
        )

    def make_fit_order(self, state: FedgeState, device: Device, *, local: bool) -> FitCandidates:
        """Make the order to fit candidates; a device that never trained fits for the median number of rounds.

        `local`: whether the device also fits a local model.
        """
        typical = round(float(np.median(list(state.participations.values())))) if state.participations else 0
        rounds = state.participations.get(device.id, typical)
        return FitCandidates(
            global_model=state.shared.model,
            experts=list_offered_experts(state, device.id) if state.experts else (),
            initial_model=state.initial_model,
            sgd=self.settings.sgd,
            local_steps=count_steps_alone(device, self.settings.sgd) * rounds if local else 0,
        )

    def calibrate(self, role: Role, fitted: Iterable[CandidatesFitted], *, pooling: bool) -> Calibration:
        """Choose the calibration with the smallest pooled loss (section 7); with few samples, that of section 12."""
        if not pooling:
            return Calibration(temperature=1.0, kappa=1.0 if role.is_shared else 0.0)
        problem, own = self.problem, not role.is_shared
        points = problem.list_choices(own=own)
        allowed = [n for n, point in enumerate(points) if self.allows(role, point)]
        there = [result for result in fitted if role in result.losses]
        sums = np.array([result.losses[role] for result in there], np.float64)
        losses = problem.compute_choice_losses(sums, own=own)
        index = allowed[choose_pooled([[row[n] for n in allowed] for row in losses.tolist()])]
        return problem.finish_choice(points[index], index, pool_means(sums, [result.n_validation for result in there]))

    def allows(self, role: Role, point: Calibration) -> bool:  # noqa: ARG002 - for variants
        """Return whether a point of the grid may be chosen."""
        return True

    def select_mixed(self, roles: list[Role]) -> list[Role]:
        """Return the candidates of the mixture, at least one."""
        return roles

    def takes_local(self, mixed: Collection[Role], piloted: Sequence[EnergyFitted]) -> bool:  # noqa: ARG002
        """Return whether the mixture has the local model (section 8)."""
        return bool(piloted) and bool(choose_pooled([m.pooled_losses for m in piloted]))

    def choose_beta(self, losses: Sequence[Sequence[float]]) -> float:
        """Choose how much the energy counts, by the devices' losses for each beta of the grid (section 9)."""
        return BETAS[choose_pooled(losses)] if losses else 0.0

    def make_mixture_order(self, pool: PooledSettings, fitted: CandidatesFitted) -> FitGate:
        """Make the order of the last step, with the pooled settings; without any candidate, with the global model.

        A device that may not report losses has at least the global and the private model.
        """
        has = fitted.losses.keys() or {Role.PRIVATE, Role.GLOBAL}
        weights = pool.weights if pool.weights.keys() & has else {Role.GLOBAL: 1.0}
        return FitGate(
            calibration={role: pool.calibration[role] for role in weights},
            pooled=weights,
            shrinkage=self.SHRINKAGE,
            beta=pool.beta,
            products=pool.products,
            sgd=self.settings.sgd,
        )
