"""Whether somebody's engine really samples from its target: from outside, from inside, and as a function."""
