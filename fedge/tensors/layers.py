"""Some layers of a model as vectors, such as those that stay on a device: cut out of the whole and put back.

Inside, a model is three vectors (`fedge.tensors.layout.Model`), and some of its layers are slices of these vectors.
Names of tensors are used only to find the slices, once for each pair of layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ProtocolError
from fedge.tensors.layout import Layout, Model, TensorInfo, Tensors, flatten, unflatten

N = TypeVar("N", bound=np.generic)
NOW, BEFORE, ROUND = "now", "before", "round"
"""Names of the two values of a vector that a device keeps and can take back, and of the round of the newer one."""


class _Span(NamedTuple):
    """A run of numbers: its slice in the whole model's vector, and its slice in the vector of some layers."""

    whole: slice
    part: slice


class _Spans(NamedTuple):
    """The runs of some layers' numbers in the three vectors of a model."""

    params: tuple[_Span, ...]
    buffers: tuple[_Span, ...]
    counters: tuple[_Span, ...]


@dataclass(frozen=True, slots=True)
class Layers:
    """Some tensors as vectors with their layout: a network's layers, or tensors beside it, such as an offset.

    `layers[name]` is one tensor, a view where possible.
    """

    layout: Layout
    model: Model

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        return self.get_tensors()[name]

    def keys(self) -> KeysView[str]:
        """Return the names of the tensors."""
        return self.get_tensors().keys()

    def get_tensors(self) -> Tensors:
        """Return all tensors by name, views where possible, for files and messages."""
        return unflatten(self.model, self.layout)


def make_layers(tensors: Mapping[str, NDArray[np.generic]], layout: Layout) -> Layers:
    """Turn named tensors, such as those of a file, into vectors. `layout` is the network's; other tensors are allowed.

    Of these, whole numbers (int64) are counters.

    Raises:
        ProtocolError: `layout` (a tensor of the network has another shape or type) or `not-finite`.
    """
    known = tuple(info for info in layout.tensors if info.name in tensors)
    names = {info.name for info in known}
    others = tuple(_describe(name, tensor) for name, tensor in sorted(tensors.items()) if name not in names)
    found = Layout(tensors=(*known, *others))
    return Layers(found, flatten(tensors, found))


def _describe(name: str, tensor: NDArray[np.generic]) -> TensorInfo:
    """Describe a tensor that is not of the network: whole numbers are a counter."""
    return TensorInfo(name=name, shape=tensor.shape, kind="counter" if tensor.dtype == np.int64 else "param")


def make_reversible_layout(layout: Layout) -> Layout:
    """Return the layout of a vector as long as a network's parameters, (d,), with the vector before it, (d,).

    A device keeps both, and the round of the newer one, if its server sums what devices keep (SCAFFOLD, FedDyn): each
    device's vector must be that of its last report that counted (`edge_agent.learning.reversible`).
    """
    vectors = (TensorInfo(name=name, shape=(layout.n_params,)) for name in (NOW, BEFORE))
    return Layout(tensors=(*vectors, TensorInfo(name=ROUND, shape=(), kind="counter")))


def select_params(layout: Layout) -> Layout:
    """Return the layout of the trainable tensors alone, such as that of a control variate."""
    return Layout(tensors=layout.select_kind("param"))


def cut(model: Model, layout: Layout, part: Layout) -> Model:
    """Copy some layers of a model; return the model itself if they are all of it.

    Raises:
        ProtocolError: `layout` if they are no layers of such a model.
    """
    if part == layout:
        return model
    spans = _find_spans(layout, part)
    return Model(
        params=_take(model.params, spans.params),
        buffers=_take(model.buffers, spans.buffers),
        counters=_take(model.counters, spans.counters),
    )


def paste(model: Model, layers: Layers, layout: Layout) -> Model:
    """Return the model with some of its layers replaced; if `layers` is a whole model, return that.

    Raises:
        ProtocolError: `layout` if they are no layers of such a model.
    """
    own = layers.model
    if layers.layout == layout:
        return own
    spans = _find_spans(layout, layers.layout)
    return Model(
        params=_replace(model.params, own.params, spans.params),
        buffers=_replace(model.buffers, own.buffers, spans.buffers),
        counters=_replace(model.counters, own.counters, spans.counters),
    )


def join(parts: Sequence[Layers], layout: Layout) -> Model:
    """Join parts that together have all layers into a model.

    Raises:
        ProtocolError: `layout` if they are no layers of such a model, or not all of it.
    """
    if missing := set(layout.tensors).difference(*(part.layout.tensors for part in parts)):
        raise ProtocolError("layout", f"tensors {sorted(info.name for info in missing)} are missing")
    sizes = (sum(info.size for info in layout.select_kind(kind)) for kind in ("param", "buffer", "counter"))
    model = Model(*map(np.empty, sizes, (np.float32, np.float32, np.int64)))
    for part in parts:
        spans = _find_spans(layout, part.layout)
        _fill(model.params, part.model.params, spans.params)
        _fill(model.buffers, part.model.buffers, spans.buffers)
        _fill(model.counters, part.model.counters, spans.counters)
    return model


def _take(whole: NDArray[N], spans: tuple[_Span, ...]) -> NDArray[N]:
    return np.concatenate([whole[:0], *(whole[span.whole] for span in spans)])


def _replace(whole: NDArray[N], part: NDArray[N], spans: tuple[_Span, ...]) -> NDArray[N]:
    after = whole.copy()
    _fill(after, part, spans)
    return after


def _fill(whole: NDArray[N], part: NDArray[N], spans: tuple[_Span, ...]) -> None:
    for span in spans:
        whole[span.whole] = part[span.part]


@lru_cache(maxsize=64)
def _find_spans(layout: Layout, part: Layout) -> _Spans:
    """Return where the numbers of a part are in a model of a layout."""
    return _Spans(
        *(
            _find_spans_of_kind(layout.select_kind(kind), part.select_kind(kind))
            for kind in ("param", "buffer", "counter")
        )
    )


def _find_spans_of_kind(whole: tuple[TensorInfo, ...], part: tuple[TensorInfo, ...]) -> tuple[_Span, ...]:
    """Return the spans of tensors of one kind, in the part's order; neighbouring tensors are one span."""
    starts = dict(zip(whole, itertools.accumulate((info.size for info in whole), initial=0), strict=False))
    spans: list[_Span] = []
    end = 0
    for info in part:
        if info not in starts:
            raise ProtocolError("layout", f"the network has no {info.kind} {info.name} of shape {info.shape}")
        start, begin, end = starts[info], end, end + info.size
        if spans and spans[-1].whole.stop == start:
            before = spans.pop()
            start, begin = before.whole.start, before.part.start
        spans.append(_Span(slice(start, start + end - begin), slice(begin, end)))
    return tuple(spans)
