"""The fleet of real devices, over MQTT.

`fleet` is the loop around `orders` (what is sent when, without IO) and the store; `roles` is what all processes at the
broker share; `uploads` and `checking` take updates in; `pace` estimates a device's time. Begin with `fleet`.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "fleet")
