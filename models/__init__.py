"""Two minimal full models and what they need to be trained: each file readable in one sitting."""
