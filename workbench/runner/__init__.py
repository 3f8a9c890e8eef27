"""Runs notebooks through papermill, strictly: one process each, grids, and the main job."""
