"""CFIC's label feature (cfic.md section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedge.messages import DescribeLabels, LabelsDescribed, Order

if TYPE_CHECKING:
    from edge_agent.worker import Worker


def describe_labels(worker: Worker, action: DescribeLabels, order: Order) -> LabelsDescribed:
    """Psi of D_L."""
    raise NotImplementedError
