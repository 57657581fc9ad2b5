"""Who somebody is: names in certificates, keys, and TLS.

`names` says who a certificate is for, `authority` whom a federation trusts, `certificates` reads and makes the files,
and `tls` the contexts. Signed messages, provisioning and both services use it. Begin with `names`.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "names", "authority")
