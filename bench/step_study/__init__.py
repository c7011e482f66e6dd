"""A traced training step: recorded, divided into parts, drawn, and held against the formulas."""
