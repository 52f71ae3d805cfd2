"""Triton kernels, each with a plain-torch twin that is its oracle and its CPU path."""
