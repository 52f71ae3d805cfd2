"""Decides, without doing: wanted workloads, next steps and status, as pure functions of spec and observation."""
