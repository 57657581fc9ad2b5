"""Models as vectors, and their bytes.

`layout` says which part of a vector is which tensor, `codecs` turns tensors into the bytes of a blob and back, by
`rounding` of numbers, `fixed_point` into integers whose sums are exact. Everybody who touches a model uses it. Begin
with `layout`.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "layout", "fedge.system.files")
