"""The device: a light agent that trains on its own samples when asked.

Its rooms are floors: imports go down only. Begin with `agent`, and with `steps` for what a device can be asked to do.
"""

import fedge as fedge  # paths of version 0.1
