"""From a graph that writes in place to one that does not.

What schemas do not say of operators, hidden writes and lists among results, is taken out as well.
"""
