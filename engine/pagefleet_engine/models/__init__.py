"""One short file per architecture, over shared blocks."""
