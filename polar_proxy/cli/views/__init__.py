"""Output of commands for people: a run as a story, live progress, a server's state, training curves."""
