"""Costs of operators in seconds: from data sheets, from measurements, from counts.
It knows graphs and devices, and nothing of plans. Begin with `op_work.py`, then
`device_rates.py`.
"""
