"""The fleet of real devices, over MQTT.

`fleet` is the loop around `orders` (what is sent when, without IO) and the store. It is an `intake`, too, which takes
reports; `uploads` and `checking` take updates in. `roles` are the other processes at the broker, `process` is what all
of them share; `pace` estimates a device's time. Begin with `fleet`.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "fleet")
