"""Membership of a federation: credentials, start-up kits, signed messages and certificate renewal.

`credentials` has the settings of every connection, `kit` the file with which a device joins. `signed_messages` seals
and opens messages, `renewal` keeps the certificate valid, and `broker_configuration` configures Mosquitto. Begin with
`signed_messages`.
"""
