"""Exact certificates of the rules that ship, and planted faults that they must catch."""
