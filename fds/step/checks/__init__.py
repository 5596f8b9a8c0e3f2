"""What a step checks: states, what fillers return, and that all ranks run the same step."""
