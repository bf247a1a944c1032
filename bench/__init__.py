"""Benches: what a kernel costs, measured on this machine or predicted, and labelled so."""
