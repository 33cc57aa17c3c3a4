"""Predictions and exercises: the reader commits, writes a few lines, and is told what they do."""
