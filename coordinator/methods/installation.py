"""The last round: every device gets a bundle of what was learned."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from coordinator.fleet.fleet import Fleet
from coordinator.fleet.problems import Problem, describe_reasons, select_reasons
from coordinator.methods.rounds import run_with_retries, select_results
from coordinator.methods.server.assembling import make_child_bundle, make_mixture
from coordinator.methods.state import S, State
from fedge.errors import ConfigError, FruitlessError
from fedge.steps.mixture.install import FineTune, Install, Installed
from fedge.steps.mixture.install_bundle import InstallBundle
from fedge.tensors.layout import Selector
from fedge.wire.messages import BlobRef

if TYPE_CHECKING:
    from coordinator.methods.method import Method

log = logging.getLogger("fedge.method")

CHECKPOINTS: Final = (0, 10, 20, 40, 80)
"""Numbers of fine-tuning steps to choose from on validation samples (baselines.md section 11); 0 is no fine-tuning."""
WITHOUT_VALIDATION: Final = 40
"""Steps of fine-tuning on a device without validation samples (fedge.md section 6)."""


async def install(
    method: Method[Any],
    state: S,
    fleet: Fleet,
    *,
    among: Container[str] | None = None,
    model: BlobRef | None = None,
    personal: Selector = (),
    kept_by: str | None = None,
    initial: BlobRef | None = None,
    fine_tune: bool = False,
) -> S:
    """Do the last round of a one-model method: each device installs `model`, or by default what `get_model` returns.

    `among`: the devices that install; all if None. Afterwards, unless some layers are personal, devices that do not
    train get a finished bundle. `personal`, `kept_by`, `initial`: as in `Install`. `fine_tune`: whether devices
    fine-tune what they install even if the run does not ask for it.
    """
    settings = method.settings
    tuning = FineTune(sgd=settings.sgd, checkpoints=CHECKPOINTS, otherwise=WITHOUT_VALIDATION)
    orders = {
        device.id: Install(
            model=model or method.get_model(state, device.id),
            method=method.name,
            personal=personal,
            kept_by=kept_by,
            initial=initial,
            fine_tune=tuning if fine_tune or settings.fine_tune else None,
        )
        for device in fleet.get_devices()
        if among is None or device.id in among
    }
    installed = select_results(await run_with_retries(fleet, "install", orders), Installed)
    state = msgspec.structs.replace(state, round=state.round + 1, installed=installed)
    if among is not None or personal:
        return state
    return await equip(
        method,
        state,
        fleet,
        {device.id: model or method.get_model(state, device.id) for device in fleet.get_inference_devices()},
    )


async def equip(method: Method[Any], state: S, fleet: Fleet, models: Mapping[str, BlobRef]) -> S:
    """Install a finished bundle, with kappa = 0 (fedge.md 12), on each device that does not train and has none.

    `models`: by device id; each becomes a bundle once.
    """
    new = {i: model for i, model in models.items() if i not in state.installed}
    release = get_next_release(fleet)
    finished = {
        model: await _make_bundle(method, state, fleet, model, release) for model in dict.fromkeys(new.values())
    }
    orders = {i: order for i, model in new.items() if (order := finished[model]) is not None}
    if not orders:
        return state
    installed = state.installed | select_results(await run_with_retries(fleet, "equip", orders), Installed)
    return msgspec.structs.replace(state, installed=dict(sorted(installed.items())))


def get_next_release(fleet: Fleet) -> int:
    """Return the release of the server's next bundle, higher than any that a device of the fleet has had."""
    return 1 + max((device.release for device in (*fleet.get_devices(), *fleet.get_inference_devices())), default=0)


async def _make_bundle(
    method: Method[Any], state: State, fleet: Fleet, model: BlobRef, release: int
) -> InstallBundle | None:
    """Make a bundle of the model; None if the network cannot be exported, which must not end the federation."""
    alone = make_mixture(fleet.task, [fleet.get(model, state.layout)], [1.0])
    try:
        files = await asyncio.to_thread(
            make_child_bundle, fleet.task, state.layout, alone, release=release, method=method.name
        )
    except ConfigError as error:
        log.error("event=no_bundle reason=%r", str(error))  # noqa: TRY400 - the child's text says it all
        return None
    return InstallBundle(files={name: fleet.put_bytes(data) for name, data in files.items()}, release=release)


def require_learned(method: Method[S], state: S, first: BlobRef, problems: Mapping[str, Problem]) -> None:
    """Refuse, once the rounds of training are over, to install a model that nobody has trained.

    first: the initial model. problems: of the devices, for the text.

    Raises:
        FruitlessError: no update ever came, or never as many as `--min-reports` wants, so that devices would be given
            the initial model.
    """
    asked, answered = ([getattr(line, name) for line in state.history] for name in ("asked", "answered"))
    fewest = method.settings.min_reports
    served = {method.get_model(state, i).digest for i in state.participations}
    if not state.history or (state.participations and (max(answered) >= fewest or served != {first.digest})):
        return
    if state.participations:
        what = f"no round brought the {fewest} updates that --min-reports wants, only {max(answered)} at most"
    elif sum(asked):
        what = f"none of {sum(asked)} orders to train brought an update"
    else:
        what = "no device was asked to train"
    why = describe_reasons(select_reasons(problems))
    rounds = "1 round" if len(asked) == 1 else f"{len(asked)} rounds"
    raise FruitlessError(f"nothing was learned in {rounds}: {what}" + (f". {why}" if why else ""))
