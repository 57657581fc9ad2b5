"""Steps, the work that a device can be asked to do.

`contract` defines actions and results; `training`, `mixture`, `masked` and `descriptions` hold one contract per
module. Methods write actions, and agents carry them out: the device half of `fedge.steps.training.train` is
`edge_agent.steps.training.train`. `public` lists the names for a user's own step, which this package has, too.
Begin with `training.train`.
"""

from typing import TYPE_CHECKING

from fedge.system.moved import make_getattr

if TYPE_CHECKING:
    from fedge.steps.public import *  # noqa: F403

__getattr__ = make_getattr(__name__, "public", warns=False)
