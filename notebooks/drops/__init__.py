"""A package for each notebook, or drop: its exercises, and the functions that its cells call."""
