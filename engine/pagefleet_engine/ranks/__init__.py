"""Which ranks compute one model together, and how they speak; objects that someone constructed, no global group."""
