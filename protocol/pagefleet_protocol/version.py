"""The version of the five distributions; they are released together."""

VERSION = "0.1.0"
