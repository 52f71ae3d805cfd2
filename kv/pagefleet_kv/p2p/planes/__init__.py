"""What carries frames between engines: one thread each, behind the interface of `data_plane`."""
