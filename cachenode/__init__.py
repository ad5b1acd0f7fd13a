"""The cache node: keeps computed prompts (KV) of one machine and gives them back to its engines."""
