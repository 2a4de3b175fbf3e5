"""Small things that every room uses: avals, sources of values, trees with holes, formatting."""
