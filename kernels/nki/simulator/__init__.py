"""A simulator of NKI on Trainium2, strict where the documentation is strict, and a reckoner of what a kernel costs."""
