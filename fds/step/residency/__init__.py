"""Residency, of the station `place`: where leaves live between steps, and how an update gets at them."""
