"""What belongs to each drop: its exercises, and what its cells show."""
