"""What a connection to the broker is made of.

`broker` has its settings and what comes from it; `route` and `paho` find the way to it, `connector` tries until it lets
us in, `connection` lasts as long as one TCP connection. `window` has what goes out, `subscription` what comes in;
`packet_limits` learns what the broker takes; `reasons` and `refusals` say why it refused. `fedge.wire.transport` puts
all of it together. Begin there.
"""
