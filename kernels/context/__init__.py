"""Context parallelism: one file a strategy over a mesh axis, the local attention passed in."""
