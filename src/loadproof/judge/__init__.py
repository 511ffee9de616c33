"""What it means: pure functions from samples to a verdict."""
