"""`pagefleet bench`: what an engine does on this machine, as a share of what the machine can do."""
