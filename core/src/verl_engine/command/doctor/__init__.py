"""``verl-engine doctor``: what is here, what is wrong with it, and the command that fixes it."""
