"""Training of what drafts: modules that learn from the target itself."""
