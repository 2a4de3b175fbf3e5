"""Small parts that know no graph: avals, source lines, trees with holes, text tables.

Any room above may use them, and they use none but `api_util`, `errors` and `_torch`. Begin with
`avals.py` and `source.py`.
"""
