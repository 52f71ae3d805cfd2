"""Makes a cluster as a plan wants it: one client, server-side apply, what to do when it is refused."""
