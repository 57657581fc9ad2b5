"""Devices, as a method sees them: orders go out, answers come back.

`fleet` is the interface; the rooms `mqtt` and `simulated` carry it out; `masked` (with `masked_group`), `accounted` and
`relayed` are fleets around a fleet; `quarantine` and `update_norms` keep hostile devices out. Methods and the service
use it. Begin with `fleet`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "fleet", "coordinator.store.records")
