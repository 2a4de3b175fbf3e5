"""The terminal: tables, JSON, files, exit codes and short errors.
It knows nothing of models or plans. Begin with `output.py`.
"""
