"""The version of the six distributions; they are released together."""

VERSION = "0.1.0"
