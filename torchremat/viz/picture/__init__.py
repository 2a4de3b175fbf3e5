"""All that can be drawn, as data."""
