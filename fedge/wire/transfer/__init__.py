"""Blobs over MQTT, in chunks.

`receiver` asks for byte ranges of a blob, `sender` publishes each chunk once for all receivers. `receiving`, `sending`
and `ranges` decide for them, without IO or clock; `partial_blob` is what survives a receiver. Begin with `receiver`,
which shows both sides.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "receiver", "sender", "receiving", "sending", "ranges", "partial_blob")
