"""Names of version 0.1: each leads to the present name, with a warning, until version 0.3.

For modules, `fedge` installs `Finder` when it is imported. A package that was a module itself hands out that module's
names with `make_getattr`. `python -m fedge.cli`, which systemd units on devices use, works in the same way.
`alias_names` and `alias_members` are for the functions and methods that documents named.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeVar, cast

C = TypeVar("C")

ROOMS: Final = """\
coordinator.aggregation protection
coordinator.fleet.mqtt roles fleet. checking orders pace sole uploads
coordinator.fleet.simulated ray fleet. clock devices on_ray
coordinator.methods options promises
coordinator.methods.baselines methods. dbe ditto fedavg fedavgm fedbuff fedper fedprox fedrep fedrod lg_fedavg local
coordinator.methods.baselines methods. personal_layers
coordinator.methods.papers methods. cfic fedcoe fedepc fedge pm_moe scmoe_pfl
coordinator.methods.parts methods. asynchronous averaging cohort grouping server_optimizer unresponsive
coordinator.methods.server assembling extractor extractor_training server_data:learning
coordinator ui:page
coordinator.page watch_cli:cli ui. certificates home_assistant metrics
coordinator.provision members
coordinator.service backup_cli:backup checks cli probes proof samples
coordinator.simulation rehearsal
coordinator.simulation.commands checks_cli:check simulation. cli:simulate report_cli:report sample_cli:sample
coordinator.simulation.commands simulation. tune_cli:tune
coordinator.simulation.reports simulation. outcome plots report
coordinator.store blobs control:requests database registry
coordinator.watch runs tracking
deploy.commands cli:infer install_cli:install serve_cli:serve
deploy.inference engines runtime sessions
deploy.serving batching metrics protocol sensor server statistics
deploy.updates answering examination link quality slots trust
edge_agent.agent cli context enrol_cli:enrol outbox session settings uptime workplace
edge_agent.device encoding room worker
edge_agent.learning batched candidates class_means evaluation gate mixture private_model sparsity:profile
edge_agent.privacy masking privacy_ledger:dp_ledger
edge_agent.steps.descriptions steps. describe_labels mean_features profile route trial
edge_agent.steps.masked steps. confirm_sum mask_keys mask_shares train_masked unmask
edge_agent.steps.mixture steps. fit_candidates fit_energy fit_gate fit_mixture fit_pool fit_weights install
edge_agent.steps.mixture steps. install_bundle
edge_agent.steps.training steps. share_private train train_dbe train_ditto train_dp train_rod
fedge config:settings
fedge.bundle calibration energies fusion:formula onnx_wire:graph_reader ort:runtime
fedge.commands broker cli doctor egress_cli:egress new
fedge.data images npz preprocess:preprocessing scaling table:tables task validation
fedge.data.problems labels
fedge.identity certificates tls
fedge.membership credentials kit mosquitto:broker_configuration renewal sealed:signed_messages
fedge.models weights
fedge.privacy egress ledger masking:masked_sums shamir:shares
fedge.steps divergence sgd step:contract
fedge.steps.descriptions steps. describe_labels mean_features profile route trial
fedge.steps.masked steps. confirm_sum mask_keys mask_shares train_masked unmask
fedge.steps.mixture steps. fit_candidates fit_energy fit_gate fit_mixture fit_pool fit_weights install install_bundle
fedge.steps.training steps. share_private train train_dbe train_ditto train_dp train_rod
fedge.system background child files loading logs malloc notify:systemd processor:hardware sensors:hardware
fedge.system service:systemd stopping tether text
fedge.tensors codec:codecs fixed_point
fedge.wire messages openmetrics port retained rollout topics transfer transport
fedge.wire.connection mqtt_client:paho reasons route
"""
"""A line for each present package ("room"), with the modules that moved into it; `old:new` where the name changed, too.
A word that ends in a dot is the package that the modules after it had in version 0.1."""


def _iterate_places() -> Iterator[tuple[str, str]]:
    for room, *words in map(str.split, ROOMS.splitlines()):
        before = f"{room.split('.')[0]}."
        for word in words:
            if word.endswith("."):
                before = f"{room.split('.')[0]}.{word}"
            else:
                old, _, new = word.partition(":")
                yield before + old, f"{room}.{new or old}"


NEW: Final = dict(_iterate_places())
"""Present name of each module, by its old name."""


def _warn(old: str, new: str, stacklevel: int) -> None:
    text = f"{old} is {new} now; the old name goes with version 0.3"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


class Finder:
    """Finds the modules of version 0.1 by their old names (a MetaPathFinder, whose import takes 10 ms)."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """Return the spec of the module that an old name means, or None if it is no old name."""
        return ModuleSpec(fullname, cast(Any, _Alias(NEW[fullname]))) if fullname in NEW else None


class _Alias:
    """Loads a module by its present name."""

    def __init__(self, new: str) -> None:
        self._new = new
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the present module itself, so that both names give the same classes."""
        _warn(spec.name, self._new, stacklevel=2)
        module = importlib.import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import by the old name has replaced."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType:
        """Return the code for `python -m` with the old name of a command."""
        return compile(f"import sys\nfrom {self._new} import main\nsys.exit(main())\n", fullname, "exec")


def install() -> None:
    """Make the old names of modules importable in this process."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, cast(Any, Finder()))


def alias_names(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that finds functions by their names in documents of version 0.1."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{module}.{names[name]}", stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find


def alias_members(**names: str) -> Callable[[type[C]], type[C]]:
    """Let code use and override members of a class by their names of version 0.1, with a warning."""

    def decorate(cls: type[C]) -> type[C]:
        inherited = vars(cls).get("__init_subclass__")

        def init_subclass(sub: type[C], /, **options: Any) -> None:
            for old in names.keys() & vars(sub).keys():
                if isinstance(vars(sub)[old], FunctionType | classmethod | staticmethod):
                    _warn(f"{sub.__qualname__}.{old}", names[old], stacklevel=2)
                    setattr(sub, names[old], vars(sub)[old])
            if inherited is None:
                super(cls, sub).__init_subclass__(**options)  # type: ignore[misc]
            else:
                inherited.__func__(sub, **options)

        for old, new in names.items():
            setattr(cls, old, _OldMember(old, new))
        cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
        return cls

    return decorate


class _OldMember:
    """A member's old name, which gives the present member, or the override of a class that still uses the old name."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new

    def __get__(self, instance: object, owner: type) -> Any:
        _warn(f"{owner.__qualname__}.{self._old}", self._new, stacklevel=2)
        overriding = [i for i, cls in enumerate(owner.__mro__) if vars(cls).get(self._old, self) is not self]
        if not overriding:
            return getattr(owner if instance is None else instance, self._new)
        for cls in owner.__mro__[overriding[-1] + 1 :]:  # asked by super()
            if self._new in vars(cls):
                return vars(cls)[self._new].__get__(instance, owner)
        raise AttributeError(f"{owner.__qualname__} has no attribute {self._new!r}")


def make_getattr(room: str, *modules: str, warns: bool = True) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that was a module and whose names are in modules within it now.

    Args:
        room: name of the package, such as "fedge.bundle".
        modules: names of the modules in the package that have its names now, such as "manifest".
        warns: whether a name goes with version 0.3; otherwise it stays in the package for good.
    """

    def find(name: str) -> Any:
        from importlib.util import find_spec

        if name.startswith("__") or find_spec(f"{room}.{name}") is not None:  # the latter is imported next
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        for place in modules:
            module = importlib.import_module(place if "." in place else f"{room}.{place}")
            if hasattr(module, name):
                if warns:
                    _warn(f"{room}.{name}", f"{module.__name__}.{name}", stacklevel=2)
                return getattr(module, name)
        raise AttributeError(f"module {room!r} has no attribute {name!r}")

    return find
