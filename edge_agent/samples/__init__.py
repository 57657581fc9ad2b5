"""The device's samples that grow: durable, bounded, and each in a place for ever. Without torch.

`store` is the store, which agent, runtime and commands share; `places` says where a sample belongs, `rules` what the
owner wants. Begin with `store`.
"""

from edge_agent.samples.answers import Answered
from edge_agent.samples.store import Labelled, SampleStore

__all__ = ["Answered", "Labelled", "SampleStore"]
