"""Who somebody is: names in certificates, keys, and TLS.

`names` says who a certificate is for, `authority` whom a federation trusts, `certificates` reads and makes the
files, and `tls` the contexts. Signed messages, provisioning and both services use it. Begin with `names`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "names", "authority")
