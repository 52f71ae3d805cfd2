"""Blocks of K/V in a folder on disk: one file a block, named by what it holds; and threads that move them."""
