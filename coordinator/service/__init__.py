"""The running coordinator.

`service` is the durable loop around a method, by its `settings`; `beginning` is where it starts or goes on, `summary`
what it says of the run. `cli` is `fedge coordinator` and `status`; `checks` and `probes` find what cannot work before
anything starts; `backup` copies a home. Begin with `service`.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "service", "settings", "beginning", "summary", "coordinator.store.store")
