"""What a case reserves: as the published systems reserve it, and as ours allocates it."""
