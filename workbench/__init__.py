"""Workbench for expert-parallel Mixture-of-Experts layers; see README.md."""

__version__ = "0.1.0"
