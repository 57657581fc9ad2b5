"""Who trains in a round: uniform, stratified (per cluster), the fastest, or `ccmab`, a bandit under a deadline."""

from coordinator.selection.fastest import fastest
from coordinator.selection.stratified import stratified
from coordinator.selection.uniform import cohort_size, uniform

__all__ = ["cohort_size", "fastest", "stratified", "uniform"]
