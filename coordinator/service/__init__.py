"""The running coordinator.

`service` is the durable loop around a method, `cli` is `fedge coordinator` and `status`; `checks` and `probes` find
what cannot work before anything starts; `backup` copies a home. Begin with `service`.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "service", "coordinator.store.store")
