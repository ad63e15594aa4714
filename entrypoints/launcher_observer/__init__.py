"""Watches any training script of a run from outside. It travels with the script, and imports neither the launcher nor `training`.

Standard library only: torch is used if the script has imported it, and never imported from here.
"""
