"""Command-line tools to make, teach, test and measure the course."""
