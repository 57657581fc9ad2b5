"""The agent: a light process that stays, and a child that works.

`loop` is the agent itself, around `session` (which decides, without IO) and `outbox` (which keeps what must not be
lost). `carrier` takes an order to its report. `workplace` is the child with torch and the samples. `cli` is `fedge
agent`. Begin with `loop`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "loop", "identity", "context", "carrier", "models", "events", "speech.voice")
