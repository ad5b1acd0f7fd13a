"""Pure decisions: no I/O, no clock, no threads. Everything a decision needs comes in as a value."""
