"""MQTT: messages, topics, the connection, and blobs in chunks; and the ports of small servers.

`messages` are the types, `topics` the names, `transport` keeps a connection, the room `connection` is what it
is made of, and `transfer` moves blobs over it; `port` serves HTTP within limits. Agents, coordinators and runtimes use
it. Begin with `messages`.
"""
