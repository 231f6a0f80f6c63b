"""The scene: a fact at turn 1, a dozen turns about other things, and the question at the end.

Ten facts, each planted in a conversation of its own whose other turns come in another order. All
text is fixed, the assistant's earlier replies too: only the last answer is the model's own.
"""

import random
from collections.abc import Sequence

from attrs import frozen

SEEDS = 10

_PLACES = (
    "blue locker",
    "garden shed",
    "wine cellar",
    "night safe",
    "bicycle garage",
    "music room",
    "boat house",
    "server cabinet",
    "mail box",
    "roof terrace",
)

# What a user asks and an assistant replies, about nothing in particular. None holds a code.
_SMALL_TALK = (
    (
        "How do I keep basil alive on a window sill during winter?",
        "Give it as much light as the window allows, and turn the pot every few days so that it "
        "grows evenly. Water from below when the top of the soil feels dry, and pour away what the "
        "plant has not taken up after half an hour. Basil hates cold draughts more than it hates "
        "short days, so close the window beside it. Pinch out the flowers as soon as they show.",
    ),
    (
        "Why does bread dough need to rest before it is shaped?",
        "Kneading stretches the gluten until it pulls back like a rubber band. While the dough "
        "rests, those strands relax and line up, and the yeast fills them with gas. Shape it too "
        "early and the loaf tears or springs back. Twenty minutes under a cloth are enough for a "
        "small loaf, and an hour does no harm if the kitchen is cool.",
    ),
    (
        "Which instruments usually sit at the front of an orchestra?",
        "The strings sit at the front. First violins are on the conductor's left, second violins "
        "beside them, then violas and cellos, with the double basses behind the cellos. Woodwinds "
        "sit in the middle, brass behind them, and the percussion at the back, where its sound "
        "arrives without covering everyone else.",
    ),
    (
        "What makes the sea look green in some bays and blue in others?",
        "Clear, deep water swallows red light first, so what comes back to the eye is blue. Near "
        "the coast tiny algae drift in the water, and their chlorophyll takes up blue as well as "
        "red, which leaves green. Sand stirred up by waves adds yellow, and a shallow bay with a "
        "pale floor can turn nearly turquoise around noon.",
    ),
    (
        "How should I pack a rucksack for a long walk in the hills?",
        "Put heavy things close to your back and between your shoulder blades, and light ones at "
        "the bottom and outside. Rain gear goes on top, because you will want it in a hurry. Keep "
        "food, a map and something warm where you can reach them without unpacking. Everything "
        "that must stay dry belongs in a bag of its own.",
    ),
    (
        "Why do cats knead blankets with their paws?",
        "Kittens knead their mother while they drink, because the pressure makes the milk flow. "
        "Grown cats keep the habit and show it when they feel safe and sleepy. The paws also carry "
        "scent glands, so a blanket that was kneaded smells of home afterwards. Some cats purr at "
        "the same time, others stare into the distance.",
    ),
    (
        "What is the difference between a comet and an asteroid?",
        "A comet is a lump of ice, dust and frozen gas from the far edge of the solar system. When "
        "it comes near the sun, the ice turns into vapour and streams away as a tail. An asteroid "
        "is made of rock or metal, most of them circle between Mars and Jupiter, and they have no "
        "tail because there is nothing in them that would boil off.",
    ),
    (
        "How can I learn to whistle loudly with two fingers?",
        "Wash your hands, wet your lips and tuck them over your teeth. Push the tip of the tongue "
        "back with both fingertips until it folds over itself. Close the mouth around the fingers "
        "and blow gently over the bend of the tongue. Move the fingers a little until the hiss "
        "turns into a tone, and only then blow harder.",
    ),
    (
        "Why were old city walls built with round towers?",
        "A square tower has corners, and a corner can be broken out stone by stone with a ram or a "
        "pick. A round one has no weak edge, and stones thrown at it tend to glance off. From a "
        "curved wall the guards could also see and shoot along both sides of the wall, so that no "
        "attacker found a place out of sight.",
    ),
    (
        "What should I look for when I buy a used piano?",
        "Play every key from the lowest to the highest and listen for notes that buzz or stick. "
        "Look at the pins inside, because rust there means it will not stay in tune. Ask where it "
        "stood, since dry heating cracks the sound board. Let a tuner look at it before you pay, "
        "and remember that moving it costs money as well.",
    ),
    (
        "How do bees find their way back to the hive?",
        "A young bee makes short flights around the hive first and learns how it looks from every "
        "side. On longer trips she steers by the sun, and by the pattern of the light in the sky "
        "when clouds hide it. Close to home she follows landmarks such as trees and hedges, and at "
        "the entrance the scent of her own colony.",
    ),
    (
        "What is a good way to remember the names of new people?",
        "Say the name aloud as soon as you hear it, and use it once more when you part. Link it to "
        "something you can see, such as a scarf or a loud laugh. Write down three names after the "
        "meeting, with one line about each person. If a name is gone, ask again at once, because "
        "nobody minds that on the first day.",
    ),
    (
        "Why does a glacier look blue inside its cracks?",
        "Snow that falls on a glacier is pressed together by what falls on top of it, until the "
        "air between the flakes is squeezed out. What remains is dense, clear ice with large "
        "crystals. Light that travels through metres of it loses its red part, and only the blue "
        "finds its way out again, most of all from deep cracks.",
    ),
    (
        "Which knots should a beginner in sailing know?",
        "Start with the bowline, which makes a loop that does not slip and opens easily. The "
        "figure of eight stops a rope from running out of a block. A cleat hitch holds the boat at "
        "the quay, and a round turn with two half hitches ties a fender to a rail. Practise them "
        "with closed eyes, since ropes get tangled at night.",
    ),
)


@frozen
class Turn:
    """What the user says and what the assistant replies; ``reply`` is None where the model does."""

    user: str
    reply: str | None = None


@frozen
class Conversation:
    """Turns, and the five digits that the last answer must hold."""

    turns: Sequence[Turn]
    code: str


def conversation(seed: int, small_talk: int = 12) -> Conversation:
    """The conversation with this seed, from 0 to ``SEEDS - 1``: its own fact, its own order."""
    draw = random.Random(seed)
    place = _PLACES[seed]
    code = "".join(draw.choices("123456789", k=5))
    planted = Turn(
        f"Please remember this: the code of the {place} is {code}.",
        f"I will remember that the code of the {place} is {code}.",
    )
    talk = [Turn(*each) for each in draw.sample(_SMALL_TALK, small_talk)]
    question = Turn(f"What is the code of the {place}?")
    return Conversation((planted, *talk, question), code)
