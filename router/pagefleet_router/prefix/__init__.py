"""Which engine has probably seen the beginning of a prompt."""
