"""Prompts for audits: short ones are the command's own, long ones are of about 700 tokens, half of them to be copied on."""

from __future__ import annotations

_COLOURS = ("red", "green", "blue", "amber", "violet", "white", "black", "silver")
_THINGS = ("lamp", "table", "door", "window", "chair", "shelf", "mirror", "carpet", "curtain")
_PLACES = ("hall", "kitchen", "garden", "cellar", "attic", "study", "porch")


def long_prompts() -> list[str]:
    """Four texts, each on one line."""
    rooms = [
        f"In the {_PLACES[i % 7]} stands a {_COLOURS[i % 8]} {_THINGS[i % 9]}, number {i + 1}, made in {1800 + 7 * i}."
        for i in range(34)
    ]
    rows = [f"{i + 1}, {_COLOURS[i % 8]}, {_THINGS[i % 9]}, {3 * i + 2} euros;" for i in range(60)]
    tale = [
        f"On day {i + 1} the travellers came to a {_PLACES[i % 7]} where the {_COLOURS[(3 * i) % 8]} {_THINGS[(2 * i) % 9]} was,"
        f" and they asked {('the cook', 'a child', 'the miller', 'an old man')[i % 4]} what it meant."
        for i in range(24)
    ]
    return [
        " ".join(rooms) + " The same list once more: " + " ".join(rooms[:3]) + " In the",
        " ".join(rows) + " Again from the start: " + " ".join(rows[:4]),
        " ".join(tale) + " On the last day they",
        "A letter about the house. " + " ".join(rooms[::-1]) + " I would rather not live there, because",
    ]
