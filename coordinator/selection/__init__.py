"""Who trains in a round: pure functions and a frozen state.

`select` chooses among the rules, `ccmab` is the bandit under a deadline, with a `reward_model`. Methods use them. Begin
with `select`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "select")
