"""Frozen teachers: their files, their logits, and the cache of those."""
