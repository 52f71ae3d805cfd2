"""The config.json of a model folder, read once for the engine that loads it and for the operator that plans for it."""
