"""Linear log-probability over a sharded vocabulary, with mismatch metrics."""
