"""A device, as steps see it.

`device` is what a step may use, with durable `files`. `worker` carries out orders, `encoding` makes uploads, `room`
keeps arrays that are too large for memory. Agents and simulations use them. Begin with `device`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "device", "files")
