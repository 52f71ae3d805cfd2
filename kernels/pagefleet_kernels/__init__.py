"""Triton kernels, each with a plain-torch twin that is its oracle and its CPU path.

Every public function runs the Triton kernel on CUDA tensors and the twin elsewhere; `backend=` forces either.
Nothing is imported here: sizes (`layout`) need no torch, and CPU runs never pay for Triton's import.
"""
