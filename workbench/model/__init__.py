"""Cost, roofline and time model."""
