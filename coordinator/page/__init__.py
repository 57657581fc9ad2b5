"""The fleet's page, and the commands that show the same.

`server` is the page, with `logins` and `news`; `cli` has `fedge devices`, `why`, `events` and the requests of people;
`metrics` and `home_assistant` inform other programs. The page reads `coordinator.watch` and writes requests into the
store. Begin with `server`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "server", "logins", "news")
