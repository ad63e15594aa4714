"""The input pipeline of NVIDIA DALI."""
