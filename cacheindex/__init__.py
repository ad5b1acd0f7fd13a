"""The global index: who holds which prefix, in which tier. A hint: it may be late, never dangerous."""
