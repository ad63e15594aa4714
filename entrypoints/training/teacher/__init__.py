"""Frozen teachers: their files, their logits, and the cache of these logits."""
