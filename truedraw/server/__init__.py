"""An OpenAI-compatible server over one engine."""
