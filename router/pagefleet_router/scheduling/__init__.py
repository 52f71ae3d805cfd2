"""The choice of an engine: filter, score, pick, all plain functions over one snapshot."""
