"""Tokens to text and chat messages to prompts."""
