"""Devices, as a method sees them: orders go out, answers come back.

`fleet` is the interface, which the rooms `mqtt` and `simulated` implement. `masked` (with `masked_group`), `accounted`
and `relayed` are fleets around another fleet. `quarantine` and `update_norms` keep hostile devices out. Methods and the
service use fleets. Begin with `fleet`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "fleet", "coordinator.store.records")
