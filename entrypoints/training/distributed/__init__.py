"""The process group: how processes meet, compute together and stop together, and which ones are missing."""
