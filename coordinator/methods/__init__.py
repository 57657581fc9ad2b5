"""Methods: one paper, one file that reads like its pseudocode.

`method` is the base class, `options` its settings on the command line, `promises` what it must keep. The rooms `papers`
and `baselines` hold the methods, `parts` what several share, `server` what a server learns itself. The service and
simulations run them. Begin with `baselines.fedavg`.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "method", warns=False)
