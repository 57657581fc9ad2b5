"""The parts of a connection to the broker.

`broker` has the broker's settings and messages; `route` and `paho` find the way to it, `connector` tries until it lets
us in, and `connection` lasts as long as one TCP connection. `window` holds outgoing messages, `subscription` incoming
ones. `packet_limits` learns how large packets may be; `reasons` and `refusals` explain refusals.
`fedge.wire.transport` puts all of this together. Begin there.
"""
