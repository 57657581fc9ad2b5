from __future__ import annotations

import torch

torch.set_num_threads(1)  # as the agent does; several threads on small networks mostly wait for each other
