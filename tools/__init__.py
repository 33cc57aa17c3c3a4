"""What makers and measurers of the course use."""
