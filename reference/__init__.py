"""The truth: float64 NumPy, readable in one sitting each. Imports nothing but NumPy."""
