"""The coordinator's durable state.

`store` is all of it, `database` its tables, `writer` the thread that writes them, `blobs` its tensors, `registry`
the devices by their last word, `requests` what people ask of a running coordinator, `records` the types. Begin with
`store`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "store")
