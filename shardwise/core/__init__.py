"""Units, intervals, topology and errors: pure Python, no torch."""
