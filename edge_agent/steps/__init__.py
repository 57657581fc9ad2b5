"""Device halves of steps: `run(device, action) -> result`.

The rooms are those of `fedge.steps`, where the contracts are; the listing of both shows everything that a device can be
asked to do. `public` lists what a user's own step may use; its names are this room's, too. Begin with
`training.train`, over the frame of `edge_agent.learning`.
"""

from typing import TYPE_CHECKING

from fedge.system.moved import make_getattr

if TYPE_CHECKING:
    from edge_agent.steps.public import *  # noqa: F403

__getattr__ = make_getattr(__name__, "public", warns=False)
