"""Real ranks beside the kernel: start, call, fail, explain."""
