"""MQTT: messages, topics, the connection, and blobs in chunks; and the ports of small servers.

`messages` are the types, `topics` the names, `transport` is the connection and `transfer` moves blobs over it; `route`
and `paho` find the way to a broker, `reasons` says why it refused; `port` serves HTTP within limits. Agents,
coordinators and runtimes use it. Begin with `messages`.
"""
