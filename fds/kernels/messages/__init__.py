"""Messages of few bits: numbers as integers or signs, with a scale for each group, and back."""
