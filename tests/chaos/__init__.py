"""A real training takes faults in a row, and ends as if there had been none."""
