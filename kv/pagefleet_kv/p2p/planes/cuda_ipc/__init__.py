"""Slots carried by CUDA IPC, where two engines share a host."""
