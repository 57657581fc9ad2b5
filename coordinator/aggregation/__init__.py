"""Server steps on what devices send: means of models, momentum, the trial's verdict, pooled choices."""

from coordinator.aggregation.mean import Average, WeightedSums, averaged, cluster_averages

__all__ = ["Average", "WeightedSums", "averaged", "cluster_averages"]
