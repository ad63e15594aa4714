"""The container contract, the device, and what a process reports: what every other room stands on."""
