"""A plane between devices: frames pass through staging slots, which NCCL or CUDA IPC carries."""
