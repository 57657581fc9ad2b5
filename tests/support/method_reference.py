"""docs/methods/README.md, made from the methods themselves:

python -m tests.support.method_reference > docs/methods/README.md
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import types
import typing
from pathlib import Path

import click
import msgspec

from coordinator.methods.catalogue import get_installed_methods, load_method_class
from coordinator.methods.method import Method
from coordinator.methods.option_values import list_words
from coordinator.simulation.settings import SimulationSettings

PAGES = Path(__file__).parents[2] / "docs" / "methods"
SHARED = (
    *("rounds", "participation", "min_reports", "local_steps", "local_epochs", "batch_size", "optimizer"),
    *("learning_rate", "schedule", "codec", "average", "hostile", "train_on", "seed"),
)
"""Settings of the commands that reach every method."""

HEAD = """# The methods

This page is made by `python -m tests.support.method_reference`; a test checks that it is up to date.

Every method is one file in `coordinator/methods/`. It runs unchanged on simulated devices (`fedge simulate`,
`fedge compare`) and on real ones (`fedge coordinator`, `fedge demo`). It ends with a bundle on every device, which
`fedge infer` runs. With `--student` that bundle has one network in place of a mixture ([student.md](student.md)). A
method's own page has its source and its formulas, and says where it departs from its paper.
[results.md](../results.md) helps to choose a method; [privacy.md](../privacy.md) says what each lets out of a device.

<!-- not run: minutes -->
```console
fedge compare --methods local,fedavg,fedavg+ft,fedge --task digits --partition groups --seeds 0,1,2
fedge coordinator --method fedprox --option proximal_mu=0.1 --broker localhost:1883 --federation shop --home shop
```

## What all methods share

| setting | values | default | |
|---|---|---|---|
"""

AFTER = """
`selection` is set like an option of the method. `uniform` draws devices at random. `ccmab` is FedEPC's bandit with its
deadline, in each cluster or with all devices as one cluster. `stratified` draws about equally many devices from each
cluster (CFIC). `fastest` takes the devices that were fastest so far. Each method lists its own, the default first.

Momentum, weight decay, clipped gradients, label smoothing and class weights are the rest of the recipe by which devices
learn ([python.md](../python.md#how-devices-learn)).

`NAME+ft` is the method, then fine-tuning on each device, its length chosen on validation samples. `local`, `fedge`,
`pm-moe` and `scmoe-pfl` refuse it, because their final models are already fitted on each device.

Differential privacy (`--dp-epsilon` or `--dp-noise`, `--dp-delta`, `--dp-clip`) and masked sums (`--masking`,
`--min-cohort`) have settings of their own. [privacy.md](../privacy.md) says what they promise, and
[hostile.md](../hostile.md) which of them combine.

## Options of a method

Options are set in three places: with `--option NAME=VALUE`, after colons in the name of a method
(`fedge compare --methods fedepc:clustering=k-means:n_clusters=4`), or in the table `[method]` of a TOML file. The error
for an unknown name or value names the nearest right one. The error for a refused one gives the reason. A default of `-`
is explained in the method's text. A section in that text is a section of the method's own page.

`clustering` has the same words everywhere: `aidc` (FedEPC) of profiles, `mctc` (SCMoE-PFL) of update directions,
`labels` (CFIC) of label features, `k-means` and `agglomerative` of what the method clusters by itself. Variants that
only a table of a paper needs are classes in the benchmark that prints the table: `package.module:Class`.
A selection or clustering may be your own, too: [extending.md](../extending.md#who-trains-and-who-belongs-together).

{without_clusters}
have no clustering to choose, and refuse `clustering`. `ifca` has clusters, which its devices
choose themselves, and `haccs` has those of label shares.
"""


def reference() -> str:
    """The whole file."""
    without = [
        name
        for name in get_installed_methods()
        if "clustering" not in load_method_class(name).Options.__struct_fields__
    ]
    after = AFTER.format(without_clusters=", ".join(f"`{name}`" for name in without))
    return "\n".join([HEAD + "\n".join(shared()), after, *(section(name) for name in get_installed_methods())])


def shared() -> list[str]:
    """Rows of the table of what all methods share."""
    hints = typing.get_type_hints(SimulationSettings, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(SimulationSettings)}
    rows = [
        f"| `--{name.replace('_', '-')}` | {values(hints[name])} | `{shown(defaults[name])}` | {text_of(hints[name])} |"
        for name in SHARED
    ]
    return [
        *rows,
        "| `selection` | `uniform`, `ccmab`, `stratified`, `fastest` | the method's | Who trains in a round. |",
    ]


def text_of(hint: object) -> str:
    """The description of a setting."""
    return next((text for text in typing.get_args(hint)[1:] if isinstance(text, str)), "")


def section(name: str) -> str:
    """One method: what its file says first, its page, and a table of its options."""
    kind = load_method_class(name)
    summary = (inspect.getdoc(sys.modules[kind.__module__]) or "").split("\n\n")[0]
    page = kind.__module__.rsplit(".", 1)[1]
    page = page if (PAGES / f"{page}.md").exists() else "baselines"
    selection = f"`selection`: {', '.join(f'`{how}`' for how in kind.SELECTIONS)}." if kind.SELECTIONS else ""
    parts = [f"## {name}", summary, f"Page: [{page}.md]({page}.md). {selection}".strip(), *options(kind)]
    return "\n\n".join(parts) + "\n"


def options(kind: type[Method[typing.Any]]) -> list[str]:
    """What the docstring says of the options, and the table; nothing where there are none."""
    fields = msgspec.structs.fields(kind.Options)
    if not fields:
        return []
    rows = ["| option | values | default |", "|---|---|---|"]
    hints = typing.get_type_hints(kind.Options, include_extras=True)
    rows += [f"| `{f.name}` | {values(hints[f.name])} | `{shown(f.default)}` |" for f in fields]
    return [inspect.getdoc(kind.Options) or "", "\n".join(rows)]


def values(hint: object) -> str:
    """A type as people read it."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        inner, *about = typing.get_args(hint)
        if inner is str and (words := list_words(hint)):
            return f"{', '.join(f'`{word}`' for word in words)} or your own"
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        named = [(sign, getattr(each, name, None)) for each in about for name, sign in signs.items()]
        bounds = [f"{sign} {bound}" for sign, bound in named if bound is not None]
        return " ".join([values(inner), ", ".join(bounds)]).strip()
    if origin is typing.Literal:
        return ", ".join(f"`{shown(value)}`" for value in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return ", ".join(f"`{value}`" for value in hint)
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
