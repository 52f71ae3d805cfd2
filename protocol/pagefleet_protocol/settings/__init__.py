"""Settings of every program: the fields of frozen dataclasses, given as flags, variables or lines of a YAML file."""
