"""Records and result files: their schema, and tables of them."""
