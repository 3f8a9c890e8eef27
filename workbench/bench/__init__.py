"""Records, protocol, sweeps."""
