"""The fleet of real devices, over MQTT.

`fleet` is the interface for methods, the last of a row of classes. `process` is the base of all processes at the
broker. `intake` takes reports (with `uploads` and `checking`). `presence` knows the devices. `following` follows their
open orders (with `orders`, which decides without IO what is sent when). `roles` are the other processes; `pace`
estimates a device's time. Begin with `fleet`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "fleet", "presence")
