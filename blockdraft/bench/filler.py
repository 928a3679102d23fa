"""Readable notes about nothing in particular, of any length: the context put before a prompt.

Sentences are drawn from patterns whose gaps are filled from word lists, so that neither a drafter
nor a cache finds one text repeated. The same seed gives the same notes, and a longer text begins
with the shorter one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_LISTS = """
name:
    Amara; Bogdan; Cecilia; Dario; Elspeth; Farid; Greta; Hiroshi; Ingrid; Jonas; Kavita; Lorcan;
    Mireille; Nadia; Olek; Petra; Quentin; Rosalind; Samir; Tove; Ulrich; Vanja; Winifred; Xenia;
    Yusuf; Zelda; Anselm; Beatriz; Corin; Delphine

role:
    the caretaker; the ferry pilot; the archivist; the night baker; the surveyor; the bell founder;
    the school cook; the orchard keeper; the print apprentice; the harbour clerk; the piano tuner;
    the weather observer; the glazier; the seed merchant; the bridge inspector; the village nurse

place:
    the lower quay; the old tannery; the upper meadow; the reading room; the boat shed; the tram
    depot; the walled garden; the pumping station; the north stairwell; the chapel yard; the market
    hall; the quarry path; the glasshouse; the signal box; the cooperage; the flooded cellar; the
    weir; the drying loft; the bus shelter; the observatory

thing:
    a brass compass; three crates of lamp glass; a ledger with torn corners; the spare rudder; a box
    of copper rivets; the long ladder; an unfinished map; a pair of wading boots; the second kettle;
    a roll of blue canvas; the cracked bell; two bags of lime; a tin of saddle soap; the visitors'
    book; a wicker cradle; the winter curtains; a bundle of willow rods; the borrowed typewriter; a
    jar of dried figs; the broken sundial; a coil of tarred rope; the church key; a stack of slate
    tiles; the beekeeper's veil

animal:
    a heron; the grey mare; two magpies; a stoat; the ferryman's dog; a family of swifts; one
    stubborn goat; an otter; the miller's geese; a tawny owl; several hares; a pike

food:
    barley soup; smoked trout; plum dumplings; rye bread; cold lentils; pickled beets; chestnut
    cake; onion broth; sheep's cheese; stewed quinces; oat biscuits; roast parsnips

weather:
    fog until noon; a dry east wind; steady drizzle; the first hard frost; unusual warmth; thin
    snow; sudden hail; low cloud and no wind; a clear, bitter night; thunder far to the south

month:
    January; February; March; April; May; June; July; August; September; October; November; December

day:
    Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday

deed:
    counted the steps; repainted the gate; measured the gap under the door; sorted the letters by
    year; oiled every hinge; carried the chairs upstairs; traced the leak to a loose flange; wrote
    out the rota by hand; swept the drains; copied the inscription; weighed the sacks again; cut
    back the brambles; rewired the lamp; tested the water twice; labelled the shelves; rebuilt the
    low wall

judgement:
    sound enough; older than it looks; not worth the mending; better left alone; surprisingly light;
    a little crooked; finer than expected; due for replacement; the wrong size; exactly as
    described; past saving; of local make

reason:
    the tide tables had been misread; nobody had asked the neighbours; the hinge was fitted upside
    down; the road was closed for a funeral; the figures came from an older survey; the paint had
    never dried; the contract named a different parish; a mouse had eaten the label; the clock ran
    slow all winter; the timber had been cut too green

colour:
    ochre; slate blue; rust red; bottle green; off white; mustard; charcoal; pale rose; umber;
    silver
"""


def _parsed(lists: str) -> dict[str, tuple[str, ...]]:
    """{name: words} of lines "name:", each followed by indented lines of words."""
    words = {}
    for part in lists.strip().split("\n\n"):
        name, _, items = part.partition(":")
        words[name] = tuple(" ".join(items.split()).split("; "))
    return words


_WORDS = _parsed(_LISTS)

_PATTERNS = (
    "On {day} {name} brought {thing} to {place}, and {role} said it was {judgement}.",
    "It took {number} minutes to walk from {place} to {place}, mostly because of {weather}.",
    "{name} {deed} before breakfast and found {thing} behind the panelling.",
    "Nobody remembers who left {thing} at {place}; {name} thinks it was {role}.",
    "The report for {month} blames the delay on a simple fact: {reason}.",
    "After {weather} the paths were empty except for {animal}.",
    "{role} asked for {number} metres of cord and received {number}, which {name} considered {judgement}.",
    "There was {food} at midday, and a long discussion of whether {place} should be painted {colour}.",
    "{name} and {name} {deed}, then disagreed about {thing}.",
    "According to the notebook, {animal} was seen near {place} at {hour} in the {daypart}.",
    "The price of repairing {place} was put at {number} crowns, not counting {thing}.",
    "A letter dated {number} {month} mentions {thing}, but gives the colour as {colour}.",
    "{role} has kept {thing} since {month}, although it is {judgement}.",
    "When the rain stopped, {name} went back to {place} and {deed}.",
    "The meeting of {day} ended early: {reason}, and {role} had to be fetched.",
    "Of the {number} visitors in {month}, only {name} asked about {thing}.",
    "{name} recommends {food} with {food}, preferably eaten outdoors near {place}.",
    "We expected {weather}; instead {animal} kept everyone awake until {hour}.",
    "The lock at {place} is {judgement}, so {role} now carries {thing} everywhere.",
    "An entry in {colour} ink says that {name} {deed} in {month}, long before the inspection.",
    "If {place} floods again, {thing} should be moved first and {thing} second.",
    "{name} counted {number} windows on the {side} side, of which {small} did not open.",
    "The children drew {animal} beside {place}, and coloured the sky {colour}.",
    "It later turned out that {reason}, which explains the missing {number} crowns.",
    "Between {place} and the {side} road lies a strip of ground that {role} calls {judgement}.",
    "{role} {deed} on {day}, and again on {day}, without saying why.",
    "For supper there was {food}; {name} had hoped for {food}.",
    "The inventory lists {thing} twice, once under {month} and once under {month}.",
    "{name} sold {thing} for {number} crowns and regretted it by {day}.",
    "Visitors are asked to keep to the {side} side of {place} whenever there is {weather}.",
    "At {hour} the lamp went out; {name} blamed {animal}, and {role} blamed the wiring.",
    "Some {number} years ago {place} was {colour}, as a photograph of {name} shows.",
    "Please return {thing} to {role} before the end of {month}.",
    "What {name} called progress, {name} called {judgement}, and both were partly right.",
    "The {side} wall leans by {small} degrees, though {role} insists that it is {judgement}.",
    "They waited at {place} for {small} hours with nothing but {food} and {thing}.",
)
_MAX_NUMBER = 240
_MAX_SMALL = 9


def filler(num_words: int, *, seed: str) -> str:
    """Exactly so many words of notes, in paragraphs."""
    words = 0
    kept: list[str] = []
    for paragraph in _paragraphs(random.Random(f"filler/{seed}")):
        parts = paragraph.split()
        if words + len(parts) >= num_words:
            kept.append(" ".join(parts[: num_words - words]))
            return "\n\n".join(kept)
        kept.append(paragraph)
        words += len(parts)
    raise AssertionError("the notes do not end")


def _paragraphs(draw: random.Random) -> Iterator[str]:
    number = draw.randint(100, 900)
    while True:
        number += draw.randint(1, 7)
        sentences = draw.sample(_PATTERNS, draw.randint(3, 7))
        title = f"Note {number}, {draw.randint(1, 28)} {draw.choice(_WORDS['month'])}."
        yield " ".join([title, *(_filled(sentence, draw) for sentence in sentences)])


def _filled(pattern: str, draw: random.Random) -> str:
    """The pattern with each gap filled afresh: two names in one sentence differ."""
    used: set[str] = set()
    pieces: list[str] = []
    for piece in pattern.replace("}", "{").split("{"):
        is_gap = len(pieces) % 2 == 1
        pieces.append(_word(piece, draw, used) if is_gap else piece)
    text = "".join(pieces)
    return text[0].upper() + text[1:]


def _word(gap: str, draw: random.Random, used: set[str]) -> str:
    match gap:
        case "number":
            return str(draw.randint(2, _MAX_NUMBER))
        case "small":
            return str(draw.randint(2, _MAX_SMALL))
        case "hour":
            return f"{draw.randint(1, 12)}:{draw.randint(0, 59):02}"
        case "side":
            return draw.choice(("north", "south", "east", "west"))
        case "daypart":
            return draw.choice(("morning", "afternoon", "evening"))
    choices = [word for word in _WORDS[gap] if word not in used]
    word = draw.choice(choices)
    used.add(word)
    return word
