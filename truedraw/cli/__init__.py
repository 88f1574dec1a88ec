"""The command line: one file per command. What they print goes through output.py."""
