"""Tools for those who make, teach or measure the course."""
