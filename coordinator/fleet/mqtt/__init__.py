"""The fleet of real devices, over MQTT.

`fleet` is what a method may ask for. It stands on floors: `process` is what all processes at the broker share, `intake`
takes reports (with `uploads` and `checking`), `presence` knows the devices, `following` follows their open orders (with
`orders`: what is sent when, without IO). `roles` are the other processes; `pace` estimates a device's time. Begin with
`fleet`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "fleet", "presence")
