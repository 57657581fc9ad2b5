"""The authority of a federation: its members, and the credentials of its machines.

`issuer` makes and renews certificates, `members` is the list, `renewals` answers devices over the wire, `extensions`
are what certificates hold, `installation` sets up a server, `cli` is `fedge provision`. Begin with `issuer`.
"""
