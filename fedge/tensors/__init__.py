"""Models as vectors, and their bytes.

`layout` says which part of a vector is which tensor. `codecs` turns tensors into the bytes of a blob and back, with
`rounding` of numbers; `fixed_point` turns them into integers whose sums are exact. All code that handles models uses
this package. Begin with `layout`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "layout", "fedge.system.files")
