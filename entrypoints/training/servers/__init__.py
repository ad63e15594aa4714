"""Hosts that prepare images for the training hosts: their cluster, its servers, and what a training process asks of them."""
