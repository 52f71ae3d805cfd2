"""Several processes on one port: the parent that keeps them, and their figures as one."""
