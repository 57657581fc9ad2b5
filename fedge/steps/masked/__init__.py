"""The five steps of a masked sum (secure aggregation), and training under a mask.

The steps are `mask_keys`, `mask_shares`, `train_masked`, `confirm_sum` and `unmask`, in this order. The device halves
have the same names below `edge_agent.steps.masked`. Begin with `train_masked`.
"""
