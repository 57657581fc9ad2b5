"""The authority of a federation: its members, and the credentials of its machines.

`issuer` makes and renews certificates, `members` is the list of members, `renewals` answers devices over the broker,
`extensions` has the fields of certificates, `installation` sets up a server, `cli` is `fedge provision`. Begin with
`issuer`.
"""
