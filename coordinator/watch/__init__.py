"""What people and programs read of a federation.

`liveness` says whether the coordinator runs, `attention` what a person should look at, `state` reads the store and the
coordinator's summary, `words` puts them into words, `notifying` tells commands and webhooks, `runs` describes runs,
`tracking` sends figures on, and `options` has the options of commands that read a home. The service writes, the page
reads. Begin with `state`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "state", "words")
