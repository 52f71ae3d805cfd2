"""`pagefleet quantize`: a checkpoint in a float type becomes one in fewer bits."""
