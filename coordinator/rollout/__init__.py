"""A release's way into a fleet, in stages.

`decision` decides from reports alone, `service` carries that out, `folder` keeps it, `making` makes the release,
`overview` is for the page and `cli` for people. Begin with `decision`.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "decision")
