"""The edge server: methods, clustering, selection, aggregation, fleets, registry, durable store."""
