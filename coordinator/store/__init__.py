"""The coordinator's durable state.

`store` is the whole state, `database` its tables, `writer` the thread that writes them, `blobs` its tensors. `registry`
has the devices by their last messages, `changes` since when they are so, `lease` which coordinator works, `requests`
people's requests to a running coordinator, `records` the types. Begin with `store`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "store")
