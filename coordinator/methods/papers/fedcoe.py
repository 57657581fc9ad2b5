"""FedCoE: a pool of global experts, one shared gate, and cold start by assembling experts.

Source: "FedCoE: Bridging Generalization and Personalization via Federated Coordinated Dual-level MoEs", arXiv
2605.21264 (v1), with the departures of docs/methods/fedcoe.md, because with the paper's rules all experts became equal
in every run of ours. The server needs labelled samples (`coordinator.methods.server.learning`). It sees each client's
model in the clear, and which classes the client is good at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from coordinator.aggregation import correlation
from coordinator.aggregation.protection import Answers
from coordinator.fleet.fleet import Fleet
from coordinator.methods.installation import install
from coordinator.methods.method import Method, Reading
from coordinator.methods.papers import fedcoe_newcomers as newcomers
from coordinator.methods.parts.averaging import compute_update_factors
from coordinator.methods.parts.cohort import NO_CLUSTERS, SELECTIONS, ChoosingState, train_cohort
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round, make_round_rng, run_with_retries, select_results
from coordinator.methods.server.learning import ServerData, Trunk
from coordinator.methods.settings import Option
from coordinator.methods.state import GlobalModel
from export.gate import encode_gate
from fedge.errors import ConfigError
from fedge.models.training import get_torch_device
from fedge.steps.mixture.install import Installed
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Layout, Model, Tensors
from fedge.wire.messages import BlobRef, Share

log = logging.getLogger("fedge.method")

COLLAPSED_SPREAD: Final = 1e-3  # with overlap 1: all experts are one, section 13
UNIFORM_GATE: Final = 2e-3  # above 1 / K: the gate says nothing, section 10, point 1
REFRESH_EPOCHS: Final = 5  # section 5
WEIGHT_DECAY: Final = 5e-4  # of the SGD of clients and experts, section 5, unless the settings have another


class Preset(Struct, frozen=True, kw_only=True):
    """Parameters of sections 3 to 7. `refresh_every`: R_g, rounds; 0 if the gate is never trained again."""

    suitability_temperature: float = 0.1
    ranking: Literal["affinity", "raw"] = "affinity"
    tau: float = 0.9
    refresh_every: int = 0
    profile_prior: bool = True


PRESETS: Final = {
    "repaired": Preset(),
    "printed": Preset(suitability_temperature=1.0, ranking="raw", tau=0.5, refresh_every=10, profile_prior=False),
}


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of FedCoE. `preset`: repaired (section 5) or printed (the paper). `tau`: tau_E = tau_C.

    `n_experts`: K. `assemble`: devices that do not train get one model of mixed parameters, or the best two experts,
    by a profile of their samples; or the global model, which asks for none.
    """

    preset: Literal["repaired", "printed"] = "repaired"
    n_experts: Annotated[int, Meta(ge=1)] = 5
    tau: Share | None = None
    assemble: Literal["parameters", "functions", "global"] = "parameters"


ABLATION: Final = "it only remade a row of fedcoe.md section 12: benchmarks/papers/fedcoe.py has it as a class"
PRESET: Final = "preset=printed or preset=repaired sets it"
DEFAULT_STANDS: Final = "its default stands"


class Diagnostics(Struct, frozen=True, kw_only=True):
    """The diagnostics of a round (section 13)."""

    round: int
    overlap: float
    spread: float
    gate_maximum: float
    collapsed: bool


class FedCoEState(ChoosingState, frozen=True, kw_only=True):
    """The state of FedCoE. `experts`: theta_Ej; `clients`: theta_Ci.

    `gate`: the gate's tensors; `gate_file`: the gate as ONNX; `common`: mean of the experts, the start of clients
    without their own model.
    """

    common: BlobRef
    experts: tuple[BlobRef, ...] = ()
    gate: BlobRef | None = None
    gate_file: BlobRef | None = None
    clients: dict[str, BlobRef] = {}
    diagnostics: tuple[Diagnostics, ...] = ()
    profiles: dict[str, tuple[float, ...]] = {}  # rho of devices that started from it


class FedCoE(Method[FedCoEState]):
    """FedCoE; at the end clients install their own models, and all other devices an assembled one."""

    name = "fedcoe"
    HEEDS = SHARED
    Options: ClassVar[type[Struct]] = Options
    SELECTIONS = SELECTIONS
    CLASSES = "makes its experts from the classes of the server's samples"
    REFUSED = NO_CLUSTERS | {
        "clustering": "experts come from classes of the server data, and every device mixes all of them; n_experts "
        "says how many; cfic, fedepc, fedge and scmoe-pfl make clusters of devices",
        **dict.fromkeys(("suitability_temperature", "ranking"), PRESET),
        **dict.fromkeys(("gate", "profile_prior", "refresh_every", "trunk"), ABLATION),
        **dict.fromkeys(("tau_e", "tau_c"), "tau sets both"),
        "n_top": "N_top is half of the clients of a round, as in the paper; n_experts says how many experts they feed",
        "weight_decay": "--weight-decay sets it for every method",
        **dict.fromkeys(("delta", "pretraining_epochs", "refresh_epochs", "size_weighting", "top"), DEFAULT_STANDS),
        **dict.fromkeys(
            ("median", "trimmed-mean", "multi-krum", "centred-clipping"),
            "the server weighs devices by how their models do on its own samples: take --average norm-clipped, clipped "
            "or mean",
        ),
    }
    PRETRAINING_EPOCHS: ClassVar[int] = 30
    """Epochs of the experts' and the gate's training before round 1, section 3."""
    TOP: ClassVar[int] = 2
    """k, experts of a new client with "functions" and of a sample in the global model."""
    TRUNK: ClassVar[Trunk] = "auto"
    """Trunk of the gate's network."""

    def set_up(self) -> None:
        """Refuse to run without labelled samples on the server."""
        settings, (task, server_data) = self.settings, self.server
        if isinstance(self.server, Reading):
            return
        if task is None or server_data is None:
            raise ConfigError(
                "fedcoe needs labelled samples on the server: name them with --server-data (an .npz or a folder of "
                "images; in a simulation a share of the global test set; a small public set of the same task will do, "
                "40 samples a class; never the devices' test data). Without any, use fedavg, fedper or fedge"
            )
        self.preset = self.make_parameters()
        self.sgd = msgspec.structs.replace(settings.sgd, weight_decay=settings.sgd.weight_decay or WEIGHT_DECAY)
        self.groups = correlation.assign_classes(task.n_classes, self.options.n_experts)
        self.server_data = ServerData(task, *server_data, get_torch_device(settings.train_on))

    @classmethod
    def needs_server_data(cls, options: Mapping[str, Option]) -> bool:  # noqa: ARG003 - with all of them
        """Return True, since experts and gate are trained on the server."""
        return True

    def explain_no_relays(self) -> str:
        """Return why relays are impossible: the server runs the devices' models."""
        return super().explain_no_relays() or "its server asks each device's model"

    def count_answers(self) -> Answers:
        """Count the shares that a new device tells once, or again for a bundle of another campaign (section 7)."""
        return Answers(descriptions=1)

    def make_parameters(self) -> Preset:
        """Return the preset's parameters, overridden by `tau`."""
        preset, tau = PRESETS[self.options.preset], self.options.tau
        return preset if tau is None else msgspec.structs.replace(preset, tau=tau)

    def init(self, layout: Layout, model: BlobRef) -> FedCoEState:
        """Return the state before round 1, which trains the experts from `model`."""
        return FedCoEState(round=0, layout=layout, common=model)

    def begin_campaign(self, state: FedCoEState, changed: Collection[str]) -> FedCoEState:
        """Return the state before the next campaign; experts, gate and clients' models go on."""
        state = super().begin_campaign(state, changed)
        profiles = {i: rho for i, rho in state.profiles.items() if i not in changed}
        return msgspec.structs.replace(state, diagnostics=(), profiles=profiles)

    async def round(self, state: FedCoEState, fleet: Fleet) -> FedCoEState:
        """Do a round of section 5; the first time, do section 3 before it."""
        if not state.experts:
            state = await self._pretrain(state, fleet)
        profiles, starts = await newcomers.assemble_starts(self, state, fleet)
        before = msgspec.structs.replace(state, clients=state.clients | starts)
        state, asked, updates = await train_cohort(
            self, state, fleet, state.common, lambda i: self._make_order(before, i)
        )
        state = msgspec.structs.replace(state, profiles=dict(sorted((state.profiles | profiles).items())))
        if len(updates) >= self.settings.min_reports:
            state = await self._aggregate(state, before, fleet, updates)
        return finish_round(state, asked, updates)

    async def finish(self, state: FedCoEState, fleet: Fleet) -> FedCoEState:
        """Let clients install their own models, and all other devices an assembled one."""
        if not state.experts:
            state = await self._pretrain(state, fleet)
        return await self.serve_late_joiners(await install(self, state, fleet, among=state.clients), fleet)

    def _make_order(self, state: FedCoEState, device_id: str) -> Train:
        return Train(starts=(Start(model=self.get_model(state, device_id)),), sgd=self.sgd, codec=self.settings.codec)

    # ----------------------------------------------------------------------------- section 3: experts and the gate

    async def _pretrain(self, state: FedCoEState, fleet: Fleet) -> FedCoEState:
        """Train the experts from one start, each on its own classes, and the gate."""
        experts = await asyncio.to_thread(
            self.server_data.pretrain,
            fleet.get(state.common, state.layout),
            self.groups,
            self.options.n_experts,
            epochs=self.PRETRAINING_EPOCHS,
            sgd=self.sgd,
            seed=self.settings.seed,
        )
        state = self._with_experts(state, fleet, experts)
        return await self._with_gate(state, fleet, experts, self.PRETRAINING_EPOCHS)

    def _with_experts(self, state: FedCoEState, fleet: Fleet, experts: list[Model]) -> FedCoEState:
        (common,) = correlation.mix_models(experts, np.full((1, len(experts)), 1 / len(experts)))
        assert common is not None
        return msgspec.structs.replace(
            state,
            experts=tuple(fleet.put_model(expert, state.layout) for expert in experts),
            common=fleet.put_model(common, state.layout),  # section 10, point 8
        )

    async def _with_gate(self, state: FedCoEState, fleet: Fleet, experts: list[Model], epochs: int) -> FedCoEState:
        """Train the gate (Eq. 1 and 2), starting from the present gate if there is one."""
        start = None if state.gate is None else fleet.get_tensors(state.gate)
        seed = int(make_round_rng(self.settings, state.round).integers(2**31))
        gate = await asyncio.to_thread(self.train_gate, experts, start, epochs=epochs, seed=seed)
        file = encode_gate(gate, self.server_data.task.input_shape)
        return msgspec.structs.replace(state, gate=fleet.put(gate), gate_file=fleet.put_bytes(file))

    def train_gate(self, experts: list[Model], start: Tensors | None, *, epochs: int, seed: int) -> Tensors:
        """Train a gate that learns which experts are sure of a sample (Eq. 1 and 2). `start`: an earlier gate."""
        s = correlation.compute_suitability(
            self.server_data.compute_scores(experts), self.preset.suitability_temperature
        )
        return self.server_data.train_gate(s, start, trunk=self.TRUNK, epochs=epochs, seed=seed)

    # --------------------------------------------------------------------------------------- section 5: one round

    async def _aggregate(
        self, state: FedCoEState, before: FedCoEState, fleet: Fleet, updates: dict[str, Trained]
    ) -> FedCoEState:
        """Compute scores, correlation, experts (Eq. 9), gate, and clients (Eq. 11).

        `before`: a state with the models that the clients started from.
        """
        factors = compute_update_factors(self, fleet, updates, state.layout)

        def iterate_clients() -> Iterator[Model]:
            """Iterate over theta_Ci; they are read twice, so that only one is in memory at a time."""
            return (self._apply_update(before, fleet, i, update, *factors[i]) for i, update in updates.items())

        a = await asyncio.to_thread(lambda: self.server_data.compute_scores(iterate_clients()))  # Eq. 5
        p = self.compute_routing(state, fleet)  # Eq. 6
        m = correlation.compute_correlation(p, a)  # Eq. 7
        m_e, m_c = correlation.normalise_rows(m), correlation.normalise_columns(m)  # Eq. 8
        n_top = len(updates) if self.options.n_experts == 1 else -(-len(updates) // 2)  # one expert: all (section 11)
        selected = correlation.select_clients(m_c if self.preset.ranking == "affinity" else m_e, n_top)
        w = correlation.compute_expert_weights(m, selected)  # Eq. 10
        old = self.load_experts(state, fleet)
        towards = correlation.mix_models(iterate_clients(), w)
        experts = [
            correlation.interpolate(expert, new, self.preset.tau) for expert, new in zip(old, towards, strict=True)
        ]  # Eq. 9
        own = {}
        for k, (i, client) in enumerate(zip(updates, iterate_clients(), strict=True)):
            (mix,) = correlation.mix_models(experts, m_c[:, k][None, :])
            own[i] = fleet.put_model(correlation.interpolate(client, mix, self.preset.tau), state.layout)  # Eq. 11
        diagnostics = self._diagnose(state.round + 1, selected, experts, p)
        state = self._with_experts(state, fleet, experts)
        every = self.preset.refresh_every
        if every and (state.round + 1) % every == 0:
            state = await self._with_gate(state, fleet, experts, REFRESH_EPOCHS)
        return msgspec.structs.replace(
            state,
            clients=dict(sorted((state.clients | own).items())),
            diagnostics=(*state.diagnostics, diagnostics),
        )

    def _apply_update(
        self,
        state: FedCoEState,
        fleet: Fleet,
        device_id: str,
        update: Trained,
        of_params: float,
        of_buffers: float,
    ) -> Model:
        """Compute theta_Ci after local training; `of_params`, `of_buffers`: factors of the change."""
        start, change = (
            fleet.get(self.get_model(state, device_id), state.layout),
            fleet.get(update.update, state.layout),
        )
        params = start.params + np.float32(of_params) * change.params
        return Model(params, np.float32(of_buffers) * change.buffers, change.counters)

    def load_experts(self, state: FedCoEState, fleet: Fleet) -> list[Model]:
        """Load theta_Ej."""
        return [fleet.get(expert, state.layout) for expert in state.experts]

    def compute_routing(self, state: FedCoEState, fleet: Fleet) -> correlation.Array:
        """Compute p(x) for D_s, (n, K) (Eq. 6)."""
        assert state.gate is not None
        return self.server_data.compute_routing(fleet.get_tensors(state.gate))

    def _diagnose(
        self,
        r: int,
        selected: tuple[correlation.Indices, ...],
        experts: list[Model],
        p: correlation.Array,
    ) -> Diagnostics:
        """Compute overlap, spread and gate maximum; warn if the experts have become equal (section 13)."""
        overlap, spread = correlation.compute_overlap(selected), correlation.compute_spread(experts)
        gate_maximum = float(p.max(axis=1).mean())
        merged = overlap == 1 and spread < COLLAPSED_SPREAD
        collapsed = len(experts) > 1 and (merged or gate_maximum < 1 / len(experts) + UNIFORM_GATE)
        log.log(
            logging.WARNING if collapsed else logging.DEBUG,  # otherwise the summary suffices
            "event=%s round=%s overlap=%.3f spread=%.3g gate_maximum=%.3f",
            "collapse" if collapsed else "experts",
            r,
            overlap,
            spread,
            gate_maximum,
        )
        return Diagnostics(round=r, overlap=overlap, spread=spread, gate_maximum=gate_maximum, collapsed=collapsed)

    # ------------------------------------------------------------------------------------------ section 7: cold start

    async def serve_late_joiners(self, state: FedCoEState, fleet: Fleet) -> FedCoEState:
        """Leave a bundle on each device without a bundle or a model of its own."""
        here = [device.id for device in (*fleet.get_devices(), *fleet.get_inference_devices())]
        new = sorted(i for i in here if i not in state.clients and i not in state.installed)
        profiles, orders = await newcomers.make_bundles(self, state, fleet, new)
        if left := sorted(set(new) - set(orders)):
            log.warning("event=no_profile devices=%s", left)
        installed = select_results(await run_with_retries(fleet, "assemble", orders), Installed)
        return msgspec.structs.replace(
            state,
            installed=dict(sorted((state.installed | installed).items())),
            profiles=dict(sorted((state.profiles | profiles).items())),
        )

    @staticmethod
    def assemble(experts: list[Model], rho: correlation.Array) -> Model:
        """Compute theta_init = sum_j rho_j theta_Ej (Eq. 13)."""
        (model,) = correlation.mix_models(experts, rho[None, :])
        assert model is not None
        return model

    # ------------------------------------------------------------------------------------------------- what is seen

    def get_global_model(self, state: FedCoEState) -> GlobalModel:
        """Return the gate and the experts, of which the best answer each sample (Eq. 4)."""
        if not state.experts:
            return super().get_global_model(state)
        return GlobalModel(models=state.experts, gate=state.gate, top=min(self.TOP, len(state.experts)))

    def get_model(self, state: FedCoEState, device_id: str) -> BlobRef:
        """Return the client's own model, or the mean of the experts if it has none."""
        return state.clients.get(device_id, state.common)

    def summarise(self, state: FedCoEState) -> dict[str, Any]:
        """Return the history, diagnostics of the experts, profiles of devices that started cold, and bundles."""
        return super().summarise(state) | {
            "diagnostics": msgspec.to_builtins(state.diagnostics),
            "profiles": msgspec.to_builtins(state.profiles),
        }
