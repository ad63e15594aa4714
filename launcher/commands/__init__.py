"""The command line: one function a command, thin over the Python API."""
