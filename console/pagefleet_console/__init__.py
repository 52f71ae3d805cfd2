"""The page in the browser: its files, and what a server needs to send them. It imports the standard library alone."""
