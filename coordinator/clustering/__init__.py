"""Clusterings of devices: pure functions on arrays.

`find` chooses among them, `aidc` clusters by profile, `mctc` softly by the direction of updates (`geometry`), `rivals`
are what they are compared with. Methods use it. Begin with `find`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "find")
