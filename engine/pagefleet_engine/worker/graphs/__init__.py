"""CUDA graphs: which batch runs which graph, how graphs are captured, and how they are replayed."""
