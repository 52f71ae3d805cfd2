"""Runs plans as processes of this machine: probes, restarts, rolling updates, logs."""
