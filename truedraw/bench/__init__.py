"""Paired timing of plain and speculative decoding, and bounds to judge it by."""
