"""MQTT: messages, topics, the connection, and blobs in chunks; and the ports of small servers.

`messages` has the types, `topics` the names. `transport` keeps a connection, whose parts are in `connection`, and
`transfer` moves blobs over it; `port` serves HTTP within limits. Agents, coordinators and runtimes use this package.
Begin with `messages`.
"""
