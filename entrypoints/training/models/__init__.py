"""Models: built, compiled, saved, exported."""
