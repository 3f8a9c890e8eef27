"""Triton kernels and their torch twins, imported as workbench.kernels."""
