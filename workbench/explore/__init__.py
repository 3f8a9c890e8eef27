"""Interactive explorers."""
