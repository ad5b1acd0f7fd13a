"""Natural prompts for the equality test: letters put together from sentences of our own, the same ones in every
run. Each begins with a line of its own, so that no two share a block."""

import random

SENTENCES = tuple(
    """The ferry was late again this morning, and the post came with it.
My neighbour has begun to paint his fence in a green that nobody asked for.
We had rain for three days, and the cellar smells of apples and wet wood.
The baker tried a new loaf with walnuts, which sold out before nine.
I found your old map of the valley behind the bookshelf.
The children built a raft from barrels and named it after the cat.
There is a crack in the kitchen window that whistles when the wind turns east.
Last night the whole street sat outside because the power had failed.
The doctor says that my knee will carry me to the lighthouse by spring.
A train of forty wagons stood at the crossing for an hour without a driver.
The library has moved its evening readings to the old fire station.
Your sister wrote that the harvest was poor but the wine is promising.
Nobody remembers who planted the two chestnut trees by the bridge.
I have been learning to repair clocks, and so far none of them agrees with another.
The market was full of pumpkins, and a man played the accordion beside them.
Somebody left a bicycle in the river, and the herons have taken to it.
The new teacher asks more questions than she answers, and the pupils like her for it.
We counted eleven hot air balloons over the hills on Sunday.
My grandfather used to say that a good soup forgives a bad day.
The roof of the station is being mended, so the pigeons have moved into the church.
In the afternoon the fog came down so thickly that the buses stopped.
The carpenter could not come because his van had broken down near the mill.
I have kept a jar of the plum jam for you in the cold room.
They want to build a path along the canal, with benches every hundred steps.
The choir is short of tenors and has begun to ask strangers in the shop.
A letter for you arrived here by mistake, and I put it with this one.
The orchard gate needs oil, and the dog has learned to open it anyway.
Our radio receives only two stations now, and both of them talk about football.
The museum showed a ship in a bottle that was larger than the door.
Somewhere upstairs a pipe is dripping, but only when nobody listens.
The mountain hut will open in June if the snow has melted by then.
I walked to the sea and back and met nobody except the lighthouse keeper.
The cheese from the upper farm won a prize and doubled in price.
They repaired the town clock, and now everybody discovers how late they were before.
It took four of us to carry the piano over the threshold.
The bees survived the winter and are already busy in the lime trees.
My handwriting has not improved, as you see, but the pen is new.
A stranger paid for everyone's coffee and left without giving her name.
The printer in the office prints only in blue, so all our reports look like the sky.
On Thursday the bridge is closed, and we shall have to take the long way round.""".splitlines()
)

ENDINGS = (
    "What I really wanted to tell you is that",
    "When you come to visit us, please remember to",
    "The best thing that happened this week was",
    "If you ask me what I would do in your place, I would say that",
    "Before I forget, there is one more thing:",
)

PLACES = ("harbour", "village", "valley", "island", "old town", "upper farm", "river bend", "crossing")


def prompts(count: int = 100) -> list[str]:
    """Letters of about 100 to 200 tokens, each breaking off where something must follow."""
    return [_letter(number, random.Random(f"letter {number}")) for number in range(count)]


def _letter(number: int, chance: random.Random) -> str:
    opening = f"Letter {number + 1}, written at the {chance.choice(PLACES)} on a {chance.choice(_DAYS)}. Dear friend,"
    body = chance.sample(SENTENCES, chance.randint(5, 9))
    return " ".join([opening, *body, chance.choice(ENDINGS)])


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
