"""Identities: names in certificates, keys, and TLS.

`names` says who owns a certificate, `authority` whom a federation trusts; `certificates` reads and makes the files, and
`tls` makes the contexts. Signed messages, provisioning and both services use this package. Begin with `names`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "names", "authority")
