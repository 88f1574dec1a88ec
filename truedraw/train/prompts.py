"""Prompts made from templates, subjects and a seed: what a target is asked so that its own answers can be learned from.

Held-out prompts share neither template nor subject with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from truedraw.text.prompt import Prompt
from truedraw.train.subjects import HELD_OUT, LINES, NAMES, SUBJECTS, THINGS

Words: TypeAlias = np.random.Generator
Template: TypeAlias = str | tuple[str, str, str]
"""A text, or the two turns of a user around an answer."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of task, by its share of the prompts: answers that repeat them have a small one, since copies need no modules.

    Templates name their parts: {subject}, {other}, {name}, {number}, {items}, {lines}, {code}, {text}.
    """

    name: str
    weight: float
    templates: tuple[Template, ...]
    held_out: tuple[Template, ...]
    chat: bool = True


KINDS = (
    Kind(
        "chat",
        0.36,
        (
            "Explain {subject} to a child.",
            "What should I know about {subject}?",
            "How does {subject} work?",
            "Why do people care about {subject}?",
            "I am new to {subject}. Where should I begin?",
            "What are the advantages and disadvantages of {subject}?",
            "Can you compare {subject} and {other}?",
            "What is the history of {subject}?",
            "What are common mistakes with {subject}, and how can I avoid them?",
            "Describe {subject} in a few paragraphs.",
            "Is {subject} worth learning about? Give me your reasons.",
            "My friend {name} asked me about {subject}. What should I answer?",
            "How has {subject} changed over the last {number} years?",
            "Help me understand {subject} better. I get confused easily.",
            "What would happen if there were no {subject}?",
            "Give me advice on {subject} for the winter.",
        ),
        (
            "Could you tell me something interesting about {subject}?",
            "What questions do beginners usually have about {subject}?",
            "In what ways does {subject} affect daily life?",
            "How would you prepare for a talk on {subject}?",
        ),
    ),
    Kind(
        "story",
        0.12,
        (
            "Write a short story about {subject} and a girl called {name}.",
            "Write a letter from {name} to an old friend about {subject}.",
            "Write a poem about {subject}.",
            "Tell me a story in which {name} learns about {subject} by accident.",
            "Write a dialogue between {name} and a stranger about {subject}.",
            "Invent a legend that explains {subject}.",
            "Write a speech that {name} gives about {subject}.",
        ),
        (
            "Make up a fairy tale with {subject} in it.",
            "Write a diary entry of {name}, who has spent the day with {subject}.",
        ),
    ),
    Kind(
        "lists",
        0.12,
        (
            "List {number} facts about {subject}.",
            "Give me {number} tips for {subject}.",
            "Name {number} things that are needed for {subject}, one per line.",
            "What are the steps of {subject}? Number them.",
            "Make a table of contents for a book about {subject}.",
            "Write {number} questions for a quiz about {subject}, with answers.",
            "Make a packing list for {name}, who travels because of {subject}.",
        ),
        (
            "Suggest {number} titles for an article on {subject}.",
            "Plan a week of activities around {subject}, day by day.",
        ),
    ),
    Kind(
        "code",
        0.12,
        (
            "Write a Python function that {code}.",
            "Write a Python function that {code}, with a docstring and an example.",
            "Write a JavaScript function that {code}.",
            "How do I write a program in Python that {code}?",
            "Explain this code line by line:\n\n{lines}",
            "Add comments to this code and print it again:\n\n{lines}",
            "Find the mistake in this code, if there is one:\n\n{lines}",
            "Write a class in Python for {items}, with methods to add and remove them.",
            "Write tests for a function that {code}.",
        ),
        (
            "Show me a C function that {code}.",
            "Rewrite this code so that it is easier to read:\n\n{lines}",
        ),
    ),
    Kind(
        "structure",
        0.06,
        (
            "Write a JSON object that describes {subject}, with the fields name, kind and uses.",
            "Write a JSON list with {number} entries for {items}, each with a name and a price.",
            "Make a Markdown table of {items} with the columns name, colour and weight.",
            "Write a CSV file with {number} rows about {items}.",
            "Write an HTML page about {subject}.",
            "Write a YAML file with settings for {subject}.",
        ),
        (
            "Describe {items} as a JSON array with the fields id, label and count.",
            "Write an XML document about {subject}.",
        ),
    ),
    Kind(
        "quoting",
        0.04,
        (
            "Repeat this text word for word:\n\n{text}",
            "Summarise this text in one sentence:\n\n{text}",
            "Rewrite this text in a friendlier tone:\n\n{text}",
            "Which names occur in this text?\n\n{text}",
            "Translate this text into simple English:\n\n{text}",
        ),
        (
            "Print this text again, and put a title above it:\n\n{text}",
            "Correct the grammar of this text:\n\n{text}",
        ),
    ),
    Kind(
        "turns",
        0.12,
        (
            (
                "Tell me about {subject}.",
                "I am glad to. What interests you most about {subject}?",
                "How one gets started with it.",
            ),
            ("What is {subject}?", "{subject} is something that many people know from daily life.", "Can you say more?"),
            ("Hello, my name is {name}.", "Hello {name}, how can I help you today?", "I would like to talk about {subject}."),
            ("Give me an idea for a gift.", "What does the person like?", "{subject}, and sometimes {other}."),
            ("Recommend {items}.", "How many do you need?", "About {number}, and tell me why you chose them."),
        ),
        (
            ("I am bored.", "What do you usually enjoy?", "Mostly {subject}. Any ideas?"),
            ("Do you know {subject}?", "Yes, a little. What about it?", "Tell me the most important points in order."),
        ),
    ),
    Kind(
        "text",
        0.06,
        (
            "The history of {subject} begins",
            "{subject} is one of the",
            "When {name} woke up that morning, the first thought was of {subject}.",
            "Chapter 1\n\nOn {subject}\n\n",
            "Most people who have heard of {subject} believe that",
            "{text}",
        ),
        (
            "An introduction to {subject}\n\n",
            "It was late in the evening when {name} remembered {subject}.",
        ),
        chat=False,
    ),
)


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """What the target is asked, and of which kind it is."""

    kind: str
    prompt: Prompt


def make(seed: int, index: int, *, held_out: bool = False, chat: bool = True) -> TrainingPrompt:
    """Prompt `index` of a seed: the same for the same arguments.

    chat  the target has a chat template; else all are texts to go on with
    """
    generator = np.random.default_rng((seed, index, int(held_out)))
    weights = np.array([kind.weight for kind in KINDS])
    kind = KINDS[int(generator.choice(len(KINDS), p=weights / weights.sum()))]
    templates = kind.held_out if held_out else kind.templates
    template = templates[int(generator.integers(len(templates)))]
    parts = _Parts(generator, HELD_OUT if held_out else SUBJECTS)
    if isinstance(template, str):
        text = parts.fill(template)
        return TrainingPrompt(kind.name, [{"role": "user", "content": text}] if kind.chat and chat else text)
    turns = [parts.fill(turn) for turn in template]
    if not chat:
        return TrainingPrompt(kind.name, "\n".join(turns))
    return TrainingPrompt(
        kind.name, [{"role": role, "content": turn} for role, turn in zip(("user", "assistant", "user"), turns, strict=True)]
    )


class _Parts:
    """What stands for the names in one prompt: the same in all its turns."""

    def __init__(self, generator: Words, subjects: tuple[str, ...]) -> None:
        self._generator, self._subjects = generator, subjects
        self._chosen: dict[str, str] = {}

    def fill(self, template: str) -> str:
        made: dict[str, Callable[[], str]] = {
            "subject": lambda: self._one(self._subjects),
            "other": lambda: self._one(self._subjects),
            "name": lambda: self._one(NAMES),
            "number": lambda: str(self._generator.integers(3, 16)),
            "items": lambda: self._one(THINGS),
            "code": self._task,
            "lines": self._lines,
            "text": self._text,
        }
        for name, make_part in made.items():
            if f"{{{name}}}" in template and name not in self._chosen:
                self._chosen[name] = make_part()
        return template.format(**self._chosen)

    def _one(self, choices: tuple[str, ...]) -> str:
        return choices[int(self._generator.integers(len(choices)))]

    def _task(self) -> str:
        verb = self._one(("counts", "sorts", "groups", "prints", "filters", "reads", "merges", "finds", "removes", "averages"))
        what = self._one(
            ("the words of a text", "the lines of a file", "a list of numbers", "records with a date", "two sorted lists")
        )
        how = self._one(("by length", "without repeats", "in reverse", "that are even", "larger than a limit", "in one pass"))
        return f"{verb} {what} {how}"

    def _lines(self) -> str:
        name, item = self._one(THINGS).split()[-1], self._one(("total", "count", "best", "result", "found"))
        return self._one(LINES).format(name=name, item=item, number=self._generator.integers(2, 20))

    def _text(self) -> str:
        first, second = self._one(self._subjects), self._one(self._subjects)
        name, place = self._one(NAMES), self._one(("the village", "the harbour", "the school", "a small museum", "the market"))
        sentences = (
            f"{name} came to {place} in {self._generator.integers(1890, 2020)} and left as an old man.",
            f"In those days {first} was known to few people there.",
            f"The first meeting about {second} drew {self._generator.integers(5, 90)} visitors.",
            f"Some of them remembered {first} from their youth.",
            "Since then the day has been kept every year, in rain and in sunshine.",
        )
        start = int(self._generator.integers(2))
        return " ".join(sentences[start : start + int(self._generator.integers(3, 5))])
