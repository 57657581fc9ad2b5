"""A model server: HTTP in the V2 protocol, sensors over MQTT, metrics.

`server` is the port, `protocol` reads and writes bodies, `endpoints` has the models under their names, and `batching`
runs graphs in one thread. `fedge serve` uses this package. Begin with `server`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "endpoints")
