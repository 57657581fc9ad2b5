"""Blobs over MQTT, in chunks.

`receiver` requests byte ranges of a blob; `sender` publishes each chunk once for all receivers. `receiving`, `sending`
and `ranges` decide for them, without IO or clock. `partial_blob` stores the part that survives a receiver. Begin with
`receiver`, which describes both sides.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "receiver", "sender", "receiving", "sending", "ranges", "partial_blob")
