"""Stands for AWS's smdebug, which does not run beside today's packages."""
