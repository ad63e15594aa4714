"""The command line: one file per command, a thin layer over the Python API."""
