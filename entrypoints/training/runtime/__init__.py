"""The container contract, the device, and what a process reports: the base of all other packages."""
