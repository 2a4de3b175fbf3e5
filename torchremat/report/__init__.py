"""Reports of a checkpoint: values saved and recomputed, reasons, measured bytes.

Reports read programs and never change them. The room stands on `remat`, and knows no plan and
no compiler. Begin with `explain.py`; measured figures come from `live_bytes.py`.
"""
