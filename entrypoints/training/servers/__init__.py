"""Hosts that prepare images for those that train: their cluster, its servers, and what a training process asks of them."""
