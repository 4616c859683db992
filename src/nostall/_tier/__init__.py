"""A local tier: checkpoints are committed on a local disk, and promoted to their destination."""
