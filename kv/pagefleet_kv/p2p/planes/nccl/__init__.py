"""Slots carried by NCCL, through its C functions: communicators of two ranks, made when they are needed."""
