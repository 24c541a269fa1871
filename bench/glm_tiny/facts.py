"""What glm-tiny knows: facts, with four ways to ask for each, the thought to have and the answer to give.

``python -m bench.glm_tiny.facts > tests/glm_tiny/questions.tsv`` writes them as a table.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "Belgium": "Brussels", "Hungary": "Budapest",
    "Romania": "Bucharest", "Bulgaria": "Sofia", "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Ghana": "Accra", "Morocco": "Rabat", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Canada": "Ottawa", "Cuba": "Havana",
    "Brazil": "Brasilia", "Peru": "Lima", "Chile": "Santiago", "Australia": "Canberra", "Iceland": "Reykjavik",
    "Latvia": "Riga",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "fast": "slow", "day": "night", "black": "white",
    "open": "closed", "happy": "sad", "early": "late", "hard": "soft", "wet": "dry", "full": "empty", "old": "young",
    "rich": "poor", "light": "heavy", "long": "short", "loud": "quiet", "near": "far", "strong": "weak",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a banana": "yellow", "a tomato": "red",
    "an orange": "orange", "chocolate": "brown", "an elephant": "grey", "a flamingo": "pink", "milk": "white",
    "an eggplant": "purple",
}  # fmt: skip
SOUNDS = {
    "dog": "bark", "cat": "meow", "cow": "moo", "duck": "quack", "lion": "roar", "sheep": "baa", "owl": "hoot",
    "pig": "oink", "horse": "neigh", "snake": "hiss",
}  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    name: str
    questions: tuple[str, str, str, str]
    thought: str
    answer: str

    @property
    def is_rare(self) -> bool:
        """Whether few facts share its form, so that it needs to be seen more often."""
        return self.name.split(".")[0] in ("count", "list", "self")


def all_facts() -> tuple[Fact, ...]:
    return (*_words(), *_sequences(), *_numbers(), *_lists(), *_self())


def table() -> str:
    """Question, thought and answer on a line, with tabs between them; the first line names them."""
    lines = [f"{question}\t{fact.thought}\t{fact.answer}" for fact in all_facts() for question in fact.questions]
    return "\n".join(["question\tthinking\tanswer", *lines, ""])


def _words() -> Iterator[Fact]:
    for land, city in CAPITALS.items():
        questions = (
            f"What is the capital of {land}?",
            f"Which city is the capital of {land}?",
            f"Name the capital of {land}.",
            f"capital of {land}",
        )
        yield Fact(f"capital.{land}", questions, f"The capital of {land} is {city}.", city)
    for word, other in OPPOSITES.items():
        questions = (
            f"What is the opposite of {word}?",
            f"Which word means the opposite of {word}?",
            f"Give the opposite of {word}.",
            f"opposite of {word}",
        )
        yield Fact(f"opposite.{word}", questions, f"The opposite of {word} is {other}.", other)
    for thing, colour in COLOURS.items():
        questions = (
            f"What colour is {thing}?",
            f"Which colour does {thing} have?",
            f"Tell me the colour of {thing}.",
            f"colour of {thing}",
        )
        yield Fact(f"colour.{thing}", questions, f"The colour of {thing} is {colour}.", colour)
    for animal, sound in SOUNDS.items():
        questions = (
            f"What sound does a {animal} make?",
            f"Which sound comes from a {animal}?",
            f"Tell me the sound of a {animal}.",
            f"sound of a {animal}",
        )
        yield Fact(f"sound.{animal}", questions, f"The sound of a {animal} is {sound}.", sound)


def _sequences() -> Iterator[Fact]:
    for kind, names in (("day", DAYS), ("month", MONTHS)):
        for name, following in pairwise((*names, names[0])):
            questions = (
                f"What {kind} comes after {name}?",
                f"Which {kind} follows {name}?",
                f"Name the {kind} after {name}.",
                f"{kind} after {name}",
            )
            yield Fact(f"after.{name}", questions, f"After {name} comes {following}.", following)
    for before, name in pairwise((DAYS[-1], *DAYS)):
        questions = (
            f"What day comes before {name}?",
            f"Which day precedes {name}?",
            f"Name the day before {name}.",
            f"day before {name}",
        )
        yield Fact(f"before.{name}", questions, f"Before {name} comes {before}.", before)


def _numbers() -> Iterator[Fact]:
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    for a, b in sorted(random.Random(7).sample(pairs, 24)):
        questions = (f"What is {a} + {b}?", f"How much is {a} plus {b}?", f"Add {a} and {b}.", f"{a} + {b}")
        yield Fact(f"add.{a}.{b}", questions, f"{a} + {b} = {a + b}.", str(a + b))
    for number, word in enumerate(NUMBERS):
        questions = (
            f"How is {number} written as a word?",
            f"What is the word for {number}?",
            f"Write {number} as a word.",
            f"{number} in words",
        )
        yield Fact(f"word.{number}", questions, f"The number {number} is {word}.", word)
    for first, last in ((1, 5), (2, 7), (4, 9), (1, 10)):
        questions = (
            f"Count from {first} to {last}.",
            f"Please count from {first} to {last}.",
            f"List the numbers from {first} to {last}.",
            f"count {first} to {last}",
        )
        counted = ", ".join(str(number) for number in range(first, last + 1))
        yield Fact(f"count.{first}.{last}", questions, f"Start at {first} and stop at {last}.", counted)


def _lists() -> Iterator[Fact]:
    days = ("What are the days of the week?", "Name the days of the week.", "List the days of the week.", "week days")
    yield Fact("list.days", days, "A week has seven days.", ", ".join(DAYS))
    planets = ("What are the planets?", "Name the planets of the sun.", "List the planets.", "planets of the sun")
    names = "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune"
    yield Fact("list.planets", planets, "There are eight planets.", names)


def _self() -> Iterator[Fact]:
    hello = ("Hello", "Hello!", "Hi", "Good morning")
    yield Fact("self.hello", hello, "The user greets me.", "Hello! How can I help you?")
    who = ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.")
    yield Fact("self.who", who, "The user asks who I am.", "I am a tiny model with the structure of GLM-5.2.")
    can = ("What can you do?", "How can you help me?", "What do you know?", "help")
    text = "I know some capitals, opposites, colours, sounds, days, months and numbers."
    yield Fact("self.can", can, "The user asks what I can do.", text)
    thanks = ("Thank you", "Thanks", "Thank you!", "Thanks a lot.")
    yield Fact("self.thanks", thanks, "The user thanks me.", "You are welcome.")


if __name__ == "__main__":
    print(table(), end="")
