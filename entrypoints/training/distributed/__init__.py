"""The group of training processes: how it meets, computes together, stops together, and who is missing."""
