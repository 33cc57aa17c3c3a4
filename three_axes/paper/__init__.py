"""What can be redone by hand: collectives, schedules, where ranks stand. NumPy at most."""
