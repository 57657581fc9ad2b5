"""Server steps on what devices send: means of models, momentum, the trial's verdict, pooled choices."""

from coordinator.aggregation.mean import Average, WeightedSums, average_all, average_clusters

__all__ = ["Average", "WeightedSums", "average_all", "average_clusters"]
