"""Shapes, as SVG and PNG."""
