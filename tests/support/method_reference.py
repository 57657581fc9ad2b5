"""docs/methods.md, made from the methods themselves: python -m tests.support.method_reference > docs/methods.md."""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing

import click
import msgspec

from coordinator.methods import Idle, installed_methods, method_class

HEAD = """# The methods

Made from the methods themselves by `python -m tests.support.method_reference`; a test checks that it is up to date.

Every method is one file in `coordinator/methods/` that runs unchanged on simulated devices (`fedge simulate`,
`fedge compare`) and on real ones (`fedge coordinator`, `fedge demo`), and ends with a bundle on every device that
`fedge infer` runs. Its options are set with `--option NAME=VALUE`, after colons in the name of a method
(`fedge compare --methods fedepc:clustering=k-means:n_clusters=4`), or in the table `[method]` of a TOML file; an
unknown name or value is an error that names the nearest right one. A default of `-` means: as the method's text says.
`NAME+ft` is the method followed by fine-tuning on each device, its length chosen on validation samples; `local`,
`fedge`, `pm-moe` and `scmoe-pfl` refuse it, since what they end in is already fitted on each device.

```console
fedge compare --methods local,fedavg,fedavg+ft,fedge --task digits --partition groups --seeds 0,1,2
fedge coordinator --method fedprox --option proximal_mu=0.1 --broker localhost:1883 --federation shop --home shop
```

The parts that papers exchange are options with the same words everywhere. `clustering`: `aidc` (FedEPC) of profiles,
`mctc` (SCMoE-PFL) of update directions, `labels` (CFIC) of label features, `k-means` and `agglomerative` of what the
method clusters by itself. `selection`: `ccmab` (FedEPC), `stratified` (CFIC), `uniform`, `fastest`. A method that lacks
one of them says below why, and where to find it; asked for it, it says so and nothing runs.

The other two parts are options of their methods. What is made of the updates: `gamma` (server momentum: `fedavgm`,
`fedge`), `correction`, `norm` and `scale` (`cfic`), `weighted` (`fedepc`), `ranking` (`fedcoe`). What makes a model
personal: `+ft`; `ditto`; a part that stays on the device (`fedper` and its kin), and a pool of all of them (`pm-moe`);
a model for each cluster (`fedepc`); a mixture (`scmoe-pfl`, from which `alone` and `gate` take parts away, and `fedge`,
from which `split`, `candidates`, `local`, `prior`, `temperature`, `weights`, `energy`, `gate`, `final_fit`, `guard` and
`mode` do); assembled experts (`fedcoe`).

What each of them lets out of a device: [privacy.md](privacy.md).
"""


def reference() -> str:
    """The whole file."""
    return "\n".join([HEAD, *(section(name) for name in installed_methods())])


def section(name: str) -> str:
    """One method: what its file says, and a table of its options."""
    kind = method_class(name)
    module = inspect.getdoc(sys.modules[kind.__module__]) or ""
    parts = [f"## {name}", module, *options(kind.Options)]
    return "\n\n".join(parts) + "\n"


def options(kind: type[msgspec.Struct]) -> list[str]:
    """What the docstring says of the options, the table, and what is refused; no table where there are none."""
    fields = msgspec.structs.fields(kind)
    if not fields:
        return [*refused(kind), *idle(kind)]
    rows = ["| option | values | default |", "|---|---|---|"]
    hints = typing.get_type_hints(kind, include_extras=True)
    rows += [f"| `{f.name}` | {values(hints[f.name])} | `{shown(f.default)}` |" for f in fields]
    return [inspect.getdoc(kind) or "", "\n".join(rows), *refused(kind), *idle(kind)]


def refused(kind: type[msgspec.Struct]) -> list[str]:
    """Parts that other methods have and this one has not, with the reason."""
    reasons: dict[str, str] = getattr(kind, "REFUSED", {})
    return ["\n".join(["Refused:", "", *(f"- `{name}`: {why}." for name, why in reasons.items())])] if reasons else []


def idle(kind: type[msgspec.Struct]) -> list[str]:
    """Options that are refused beside others, since they would change nothing."""
    rules: tuple[Idle, ...] = getattr(kind, "IDLE", ())
    found = [
        f"- {', '.join(f'`{name}`' for name in names)} with "
        f"{' and '.join(' or '.join(f'`{o}={shown(v)}`' for v in of) for o, of in where.items())}: {why}."
        for names, where, why in rules
    ]
    return ["\n".join(["Refused, since it would change nothing:", "", *found])] if found else []


def values(hint: object) -> str:
    """A type as people read it."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        inner, meta = typing.get_args(hint)[:2]
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        bounds = [f"{sign} {getattr(meta, name)}" for name, sign in signs.items() if getattr(meta, name) is not None]
        return " ".join([values(inner), ", ".join(bounds)]).strip()
    if origin is typing.Literal:
        return ", ".join(f"`{shown(value)}`" for value in typing.get_args(hint))
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(values(part) for part in typing.get_args(hint) if part is not types.NoneType)
    names = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}
    return names.get(hint, re.sub(r"^.*\.", "", str(hint)))  # type: ignore[call-overload, no-any-return]


def shown(value: object) -> str:
    """A default as it is written on the command line."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    click.echo(reference(), nl=False)
