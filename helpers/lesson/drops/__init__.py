"""The exercises of each drop: what is asked, how it is judged, one way to do it."""
