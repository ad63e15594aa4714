"""Images and masks from files to arrays, on the CPU."""
