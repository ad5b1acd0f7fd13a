"""The OpenAI-compatible front door that sends each request where its prefix already is."""
