"""What crosses a process or a network: wire types, names, the block hash, the InferenceService types."""
