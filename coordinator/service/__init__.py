"""The running coordinator.

`service` is the durable loop around a method, by its `settings`. `beginning` starts or continues a run, `campaigns`
decides when the next campaign begins, `summary` reports. `cli` is `fedge coordinator` and `status`. `checks` and
`probes` find what cannot work before anything starts. `backup` copies a home. Begin with `service`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "service", "settings", "beginning", "summary", "coordinator.store.store")
