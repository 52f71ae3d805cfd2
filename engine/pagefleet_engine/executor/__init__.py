"""Runs a step plan on one or more workers."""
