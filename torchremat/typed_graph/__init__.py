"""Typed graphs: equations, printing, dead code, checking."""
