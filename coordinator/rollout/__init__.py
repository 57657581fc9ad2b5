"""A release's way into a fleet, in stages.

`decision` decides from reports alone, `service` carries decisions out, `folder` keeps the state, `making` makes the
release, `overview` is for the page and `cli` for people. Begin with `decision`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "decision")
