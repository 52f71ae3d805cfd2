"""What is here, and what is wrong with it: `pagefleet collect-env`, `pagefleet doctor`. Needs the standard library."""
