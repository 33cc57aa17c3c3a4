"""The tools that a reader keeps: plan, count, trace, explain."""
