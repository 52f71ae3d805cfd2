"""Brings a model's files into a folder, whole and verified, and works out what planning needs to know of it."""
