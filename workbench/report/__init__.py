"""Tables, figures and export."""
