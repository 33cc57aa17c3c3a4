"""What paper says: closed formulas, small enough to be redone by hand. Neither torch nor a GPU needed."""
