"""A notebook in percent cells: open it in Jupyter, VS Code or Spyder, or run it as a script."""

# %% [markdown]
# # Personal models for devices that see different data
# Twenty simulated devices learn together what they could not learn alone, and each ends with a bundle that predicts
# without PyTorch.

# %%
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedge

digits = load_digits()

# %% [markdown]
# ## A task: samples, and any network


# %%
class Net(nn.Module):
    """A network of the notebook's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, 1, 8, 8) as class scores (n, 10)."""
        return self.head(torch.relu(self.body(x.flatten(1))))


task = fedge.Task.from_arrays(digits.images.astype(np.uint8), digits.target, model=Net)

# %% [markdown]
# ## One method
# Devices are in two groups: the cameras of one are mounted upside down.

# %%
setting = {"task": task, "devices": 12, "partition": "groups", "n_groups": 2, "rounds": 10}
result = fedge.simulate(method="fedge", **setting)
result  # noqa: B018 - a notebook shows it

# %% [markdown]
# ## What a device runs

# %%
device = result.devices[0]
prediction = fedge.load(result.get_bundle(device.id)).predict(digits.images[:5])
print(device.id, device.score.accuracy, prediction.class_name)

# %% [markdown]
# ## Several methods on equal terms

# %%
table = fedge.compare(methods=["local", "fedavg", "fedge"], seeds=[0], **setting)
for row in table.to_rows():
    print(row["method"], round(row["accuracy"], 3), row["bytes_up"])
table  # noqa: B018 - a notebook shows it
