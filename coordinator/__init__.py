"""The edge server: methods, clustering, selection, aggregation, fleets, durable store, simulations, the page.

Its rooms are floors: imports go down only (`pyproject.toml`, docs/architecture.md). Begin with `service` for a running
coordinator, and with `methods` for what it learns.
"""

import fedge as fedge  # paths of version 0.1
