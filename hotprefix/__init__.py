"""The command line and the local launcher."""
