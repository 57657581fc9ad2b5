"""Belonging to a federation: what a member has and does to be heard.

`credentials` are the settings of every connection, `kit` is what a device gets to join, `signed_messages` seals and
opens what travels, `renewal` keeps the certificate valid, `broker_configuration` is what Mosquitto is told. Begin with
`signed_messages`.
"""
