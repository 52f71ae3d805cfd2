"""Kernels of the CPU, compiled from kernels/native, behind the torch operations that they replace."""
