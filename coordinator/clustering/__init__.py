"""Clusterings of devices: pure functions on arrays.

`find` chooses among them, `aidc` clusters by profile, `mctc` softly by the direction of updates (`geometry`), and
`rivals` has plain clusterings to compare with. Methods use them. Begin with `find`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "find")
